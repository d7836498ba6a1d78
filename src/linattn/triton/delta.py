"""The delta rule on Triton kernels, with any decay, forward and backward.

In a chunk every write depends on those before it. With A = scores(k, k) below the diagonal,
T = (I + Diag(beta) A)^-1 and S the state before the chunk:

    U = T Diag(beta) V - T Diag(beta) read(k) S         what is really written
    O = read(q) S + scores(q, k) U                      S <- total S + write(k)^T U

Only U and S go from chunk to chunk, in one kernel by columns of the state. Backward, Z the gradient
of the state after, dR = T^T dU that of the right side:

    dR = T^T scores(q, k)^T dO + T^T write(k) Z         Z <- total Z + read(q)^T dO
                                                              - read(k)^T Diag(beta) dR
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from linattn.triton.layout import WIDE, Chunks, block, gathered, strided
from linattn.triton.passes import Side, add, empty, read
from linattn.triton.triangular import apply_kernel, blocks_kernel, merge_kernel, written_kernel
from linattn.triton.weights import Factors, gradients, scores

COLUMNS = 16  # of the state a program carries through a sequence, all of Dk rows


class _Call:
    """What forward and backward both find of a call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor,
        mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    ):  # fmt: skip
        chunks = self.chunks = Chunks.of(q, k, v, mask, cu_seqlens)
        self.one, self.beta = chunks.column(1.0), beta
        self.factors = Factors(chunks, q, k, g, read_k=True)
        self.scores = scores(chunks, q, k, g, scale=scale)
        system = empty(chunks, chunks.count, chunks.H, chunks.size, chunks.size)
        self.keys = scores(chunks, k, k, g, strict=True, beta=beta, system=system)
        self.inverse = torch.empty_like(self.keys)
        if chunks.count > 0:
            grid = (chunks.count, chunks.H)
            blocks_kernel[grid](system, self.inverse, chunks.H, C=chunks.size)
            merge_kernel[grid](
                system, self.inverse, chunks.H, C=chunks.size, PRECISION=chunks.precision()
            )
        solved_v = self.apply(self.inverse, v, beta=True)
        solved_k = self.apply(self.inverse, self.factors.read_k, beta=True)
        self.states = empty(chunks, chunks.count, chunks.H, chunks.Dk, chunks.Dv)
        initial = None if initial_state is None else initial_state.contiguous()
        self.U, self.final = self.carry(
            solved_v, solved_k, self.factors.write_k, self.states, initial
        )

    def apply(
        self, pairs: Tensor, x: Tensor, *, beta: bool = False, transposed: bool = False
    ) -> Tensor:
        """Return pairs (Diag(beta) x) [B, N, H, D], in the dtype of the call."""
        chunks, D = self.chunks, x.shape[3]
        bd = block(D, chunks.dtype)
        out = torch.empty(
            chunks.B, chunks.N, chunks.H, D, dtype=torch.float32, device=x.device
        )  # fmt: skip
        if chunks.count > 0:
            apply_kernel[(chunks.count, chunks.H, triton.cdiv(D, bd))](
                pairs, strided(self.beta), strided(x), out=strided(out), GROUP=chunks.group(x),
                D=D, BD=bd, BETA=beta, TRANSPOSED=transposed, **chunks.common(),
            )  # fmt: skip
        return out

    def carry(
        self, right: Tensor, coefficients: Tensor, keys: Tensor, states: Tensor,
        initial: Tensor | None, *, reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return what is written (`reverse`: dR) and the last state; fill the states met."""
        chunks, total = self.chunks, self.factors.total
        sequences = len(chunks.first) - 1
        out = torch.empty_like(right)
        final = empty(chunks, sequences, chunks.H, chunks.Dk, chunks.Dv)
        keys_ = keys.expand(chunks.B, chunks.N, chunks.H, chunks.Dk) if keys.shape[
            2] in (1, chunks.H) else keys.repeat_interleave(chunks.group(keys), 2)  # fmt: skip
        written_kernel[(sequences, chunks.H, triton.cdiv(chunks.Dv, COLUMNS))](
            strided(right), strided(coefficients), strided(keys_),
            final if total is None else total, states,
            final if initial is None else initial, final, out=strided(out),
            first=chunks.first, D=chunks.Dk, DV=chunks.Dv,
            TOTAL_ROWS=1 if total is None else total.shape[2],
            BD=max(16, triton.next_power_of_2(chunks.Dk)), BV=COLUMNS, DECAY=total is not None,
            REVERSED=reverse, INITIAL=initial is not None, num_warps=WIDE, num_stages=1,
            **chunks.common(),
        )  # fmt: skip
        return out, final


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, the final state, and nothing saved."""
    call = _Call(q, k, v, log_decay, beta, mask, initial_state, cu_seqlens, scale)
    chunks, one = call.chunks, call.one
    o = v.new_empty(chunks.B, chunks.N, chunks.H, chunks.Dv)
    q_side = Side(call.factors.read_q, one, scale)
    read(chunks, q_side, Side(call.U, one), call.states, o, pairs=call.scores)
    return o, call.final, call.final.new_empty(0)


def backward(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_decay, beta and the initial state (empty if None)."""
    call = _Call(q, k, v, log_decay, beta, mask, initial_state, cu_seqlens, scale)
    chunks, one, factors, U = call.chunks, call.one, call.factors, call.U
    G, K = Side(grad_o, one), Side(factors.write_k, one)
    dU = call.apply(call.scores, grad_o, transposed=True)
    right = call.apply(call.inverse, dU, transposed=True)
    coefficients = call.apply(call.inverse, factors.write_k, transposed=True)
    strength = beta.float()[..., None]
    if mask is not None:
        strength = torch.where(mask[..., None, None], strength, 0)
    Z = add(chunks, Side(factors.read_q, one, scale), G, one)
    grouped = factors.read_k.repeat_interleave(chunks.group(factors.read_k), 2)
    dR, d_initial = call.carry(
        right, coefficients, strength * grouped, Z, grad_state.contiguous(), reverse=True
    )  # fmt: skip
    dv = strength * dR
    # V - read(k) S - A U, which is U / beta where beta is not 0.
    known = read(
        chunks, Side(factors.read_k, one), Side(U, one), call.states, torch.empty_like(U),
        pairs=call.keys,
    )  # fmt: skip
    remaining = v.float().repeat_interleave(chunks.group(v), 2) - known
    d_beta = (dR * remaining).sum(3)
    if mask is not None:
        d_beta = torch.where(mask[..., None], d_beta, 0)
    d_read_q = read(chunks, G, K, call.states, chunks.head_room(q), transposed=True, scale=scale)
    minus = Side(dv, one)
    d_read_k = read(chunks, minus, K, call.states, chunks.head_room(k), transposed=True, scale=-1.0)
    d_write_k = read(chunks, Side(U, one), K, Z, chunks.head_room(k), transposed=True)
    d_scores = scores(chunks, grad_o, U, None)
    d_keys = scores(chunks, dv, U, None, scale=-1.0, strict=True)
    dq, dk, dg = gradients(
        chunks, q, k, log_decay, scale, (call.scores, d_scores), (call.keys, d_keys),
        d_read_q, d_read_k, d_write_k, call.states, Z,
    )  # fmt: skip
    dv = gathered(dv, v).to(v.dtype)
    d_initial = state.new_empty(0) if initial_state is None else d_initial
    return dq, dk, dv, dg, d_beta.to(beta.dtype), d_initial
