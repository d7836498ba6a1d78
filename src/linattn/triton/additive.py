"""The additive recurrence on Triton kernels, forward and backward.

With q' = [scale q, bias], k' = [k, 1], v' = [v, 1] the affine kernel is the plain recurrence, and
every gradient of it is a linear attention again, over other names. G' = [G, -r] is the gradient of
the numerator and the normaliser, S and Z the states before and the gradients of those after:

    o  reads S    queries q', keys k', values v        dq  reads S^T   G', v', k
    dv reads Z    k', q', G    from the end            dk  reads Z^T   v', G', q  from the end

So the kernel of outputs.py runs four times. One decay a channel goes by the weights written out
(channel_decay.py). Nothing is saved but the inputs; the states are found again in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.triton import channel_decay
from linattn.triton.layout import WIDE, Chunks, block, gathered, strided
from linattn.triton.log_decay import crossing_kernel
from linattn.triton.passes import Side, add, empty, read, scan


class _Call:
    """What forward and backward both find of a call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
        initial_state: Tensor | None, cu_seqlens: Tensor | None,
        scale: float, bias: float, normalize: bool, causal: bool,
    ):  # fmt: skip
        chunks = Chunks.of(q, k, v, mask, cu_seqlens, causal=causal)
        self.chunks, self.g, self.causal = chunks, log_decay, causal
        self.affine, self.normalize = bias != 0.0 or normalize, normalize
        one = chunks.column(1.0)
        self.q, self.k = Side(q, chunks.column(bias), scale), Side(k, one)
        self.v = Side(v, one)
        rows = 0 if log_decay is None else chunks.count
        self.total = empty(chunks, rows, chunks.H, 1)
        initial = None if initial_state is None else initial_state.contiguous()
        self.states, self.final = self.scan(self.k, self.v, initial)

    def scan(
        self, x: Side, y: Side, initial: Tensor | None, *, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the states before all chunks (`reverse`: after) and the last one."""
        added = add(
            self.chunks, x, y, self.total, g=self.g, affine=self.affine, from_start=reverse
        )  # fmt: skip
        total = None if self.g is None else self.total
        final = scan(self.chunks, added, total, initial, reverse=reverse)
        return (added if self.causal else final), final

    def read(
        self, q: Side, k: Side, v: Side, states: Tensor, to: Tensor, *, reverse: bool = False,
        transposed: bool = False, scale: float = 1.0, sums: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write what queries q read to `to`, of the states and, if causal, in their chunks."""
        return read(
            self.chunks, q, v, states, to, k=k if self.causal else None, g=self.g,
            affine=self.affine, reverse=reverse, transposed=transposed, scale=scale, sums=sums,
        )  # fmt: skip

    def outputs(self, o: Tensor) -> Tensor | None:
        """Write o; return the sums of the weights [B, N, H], where normalised."""
        sums = self.v.one.contiguous() if self.normalize else None
        self.read(self.q, self.k, self.v, self.states, o, sums=sums)
        return sums

    def crossing(self, G: Side, Z: Tensor) -> Tensor:
        """Return the gradient of log_decay [B, N, H] in float32."""
        chunks, q, k, v = self.chunks, self.q, self.k, self.v
        dg = empty(chunks, chunks.B, chunks.N, chunks.H, 2)  # by the states and inside chunks
        if chunks.count > 0:
            crossing_kernel[(chunks.count, chunks.H)](
                strided(q.x), strided(q.one), strided(k.x), strided(k.one), strided(v.x),
                strided(v.one), strided(G.x), strided(G.one), chunks.decay(self.g),
                S=self.states, Z=Z, dg=strided(dg[..., 0]),
                dg_pairs=strided(dg[..., 1]), scale=q.scale, Q_GROUP=chunks.group(q.x),
                K_GROUP=chunks.group(k.x), V_GROUP=chunks.group(v.x), D=chunks.Dk, DV=chunks.Dv,
                BD=block(chunks.Dk, chunks.dtype), BV=block(chunks.Dv, chunks.dtype),
                AFFINE=self.affine, num_warps=WIDE, **chunks.common(),
            )  # fmt: skip
        return dg.sum(3)


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, the final state, and nothing saved."""
    if log_decay is not None and log_decay.dim() == 4:
        o, final = channel_decay.forward(q, k, v, log_decay, mask, initial_state, cu_seqlens, scale)
        return o, final, final.new_empty(0)
    call = _Call(
        q, k, v, log_decay, mask, initial_state, cu_seqlens, scale, bias, normalize, causal
    )  # fmt: skip
    o = v.new_empty(call.chunks.B, call.chunks.N, call.chunks.H, call.chunks.Dv)
    call.outputs(o)
    return o, call.final, call.final.new_empty(0)


def backward(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_decay and the initial state (empty where None)."""
    grad_state = grad_state.contiguous()
    if log_decay is not None and log_decay.dim() == 4:
        dq, dk, dv, dg, d_initial = channel_decay.backward(
            grad_o, grad_state, q, k, v, log_decay, mask, initial_state, cu_seqlens, scale
        )
        return dq, dk, dv, dg, state.new_empty(0) if initial_state is None else d_initial
    call = _Call(
        q, k, v, log_decay, mask, initial_state, cu_seqlens, scale, bias, normalize, causal
    )  # fmt: skip
    chunks = call.chunks
    G = Side(grad_o, chunks.column(0.0))
    if normalize:
        o = torch.empty_like(grad_o, dtype=torch.float32)
        sums = call.outputs(o)
        G.x = grad_o / sums[..., None]  # type: ignore[index]
        G.one = -(G.x * o).sum(-1)
    Z, d_initial = call.scan(call.q, G, grad_state, reverse=True)
    dq, dk, dv = (chunks.gradient_room(x) for x in (q, k, v))
    call.read(G, call.v, call.k, call.states, dq, transposed=True, scale=scale)
    call.read(call.v, G, call.q, Z, dk, reverse=True, transposed=True)
    call.read(call.k, call.q, G, Z, dv, reverse=True)
    d_decay = state.new_empty(0)
    if log_decay is not None:
        d_decay = call.crossing(G, Z)
        if log_decay.dim() == 1:
            d_decay = d_decay.sum((0, 1), dtype=torch.float64)
        d_decay = d_decay.to(log_decay.dtype)
    return (
        gathered(dq, q), gathered(dk, k), gathered(dv, v), d_decay,
        state.new_empty(0) if initial_state is None else d_initial,
    )  # fmt: skip
