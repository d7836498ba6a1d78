"""The additive recurrence with one decay a channel, forward and backward."""

from __future__ import annotations

from torch import Tensor

from linattn.triton.layout import Chunks, gathered
from linattn.triton.passes import Side, add, read, scan
from linattn.triton.weights import Factors, gradients, scores


class _Call:
    """What forward and backward both find of a call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None,
        initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    ):  # fmt: skip
        chunks = self.chunks = Chunks.of(q, k, v, mask, cu_seqlens)
        self.one = chunks.column(1.0)
        self.factors = Factors(chunks, q, k, g, read_k=False)
        self.scores = scores(chunks, q, k, g, scale=scale)
        initial = None if initial_state is None else initial_state.contiguous()
        write_k = Side(self.factors.write_k, self.one)
        self.states = add(chunks, write_k, Side(v, self.one), self.one)
        self.final = scan(chunks, self.states, self.factors.total, initial)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state."""
    call = _Call(q, k, v, g, mask, initial_state, cu_seqlens, scale)
    chunks, one = call.chunks, call.one
    o = v.new_empty(chunks.B, chunks.N, chunks.H, chunks.Dv)
    q_side = Side(call.factors.read_q, one, scale)
    read(chunks, q_side, Side(v, one), call.states, o, pairs=call.scores)
    return o, call.final


def backward(
    grad_o: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, g and the initial state."""
    call = _Call(q, k, v, g, mask, initial_state, cu_seqlens, scale)
    chunks, one, factors = call.chunks, call.one, call.factors
    G, V = Side(grad_o, one), Side(v, one)
    Z = add(chunks, Side(factors.read_q, one, scale), G, one)
    d_initial = scan(chunks, Z, factors.total, grad_state, reverse=True)
    dv = chunks.gradient_room(v)
    read(chunks, Side(factors.write_k, one), G, Z, dv, pairs=call.scores, reverse=True)
    K = Side(factors.write_k, one)
    d_read = read(chunks, G, K, call.states, chunks.head_room(q), transposed=True, scale=scale)
    d_write = read(chunks, V, K, Z, chunks.head_room(k), transposed=True)
    d_scores = scores(chunks, grad_o, v, None)
    dq, dk, dg = gradients(
        chunks, q, k, g, scale, (call.scores, d_scores), None, d_read, None, d_write,
        call.states, Z,
    )  # fmt: skip
    return dq, dk, gathered(dv, v), dg, d_initial
