"""The delta rule by chunks, with any decay, and its gradient.

Inside a chunk every write depends on those before it, which is a unit lower triangular system
(Yang et al. 2024). With A = scores(k, k) strictly below the diagonal and M = I + Diag(beta) A:

    U = M^-1 Diag(beta) (V - read(k) S)         what is really written, [C, Dv]
    O = read(q) S + scores(q, k) U
    S <- total S + write(k)^T U

U = X_v - X_k S with X_v = M^-1 Diag(beta) V and X_k = M^-1 Diag(beta) read(k) found for all chunks
at once; only U and S go from chunk to chunk. Backward, Z the gradient of the state after:

    dU = scores(q, k)^T dO + write(k) Z         dR = M^-T dU
    dV = Diag(beta) dR                          d read(k) = -Diag(beta) dR S^T
    d(Diag(beta) A) = -dR U^T below the diagonal
    Z <- total Z + read(q)^T dO - read(k)^T Diag(beta) dR
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.chunked.chunks import Chunks
from linattn.chunked.layout import Layout, Segment, new_states
from linattn.chunked.log_decay_gradient import LogDecayGradient
from linattn.chunked.scan import scan_backward, scan_forward


def _solve(A: Tensor, x: Tensor, *, transposed: bool = False) -> Tensor:
    """Return (I + A)^-1 x, or (I + A)^-T x, for A strictly below the diagonal."""
    if transposed:
        return torch.linalg.solve_triangular(A.mT, x, upper=True, unitriangular=True)
    return torch.linalg.solve_triangular(A, x, upper=False, unitriangular=True)


class DeltaChunks:
    """What forward and backward both need of the chunks of a segment; all [m, C, ...]."""

    def __init__(self, x: Chunks, beta: Tensor):
        self.x, self.beta = x, beta  # beta [m, C, 1]
        self.keys = x.decay.scores(x.k, x.k, diagonal=-1)  # A [m, C, C]
        self.system = self.keys * beta  # Diag(beta) A
        self.read_k = x.decay.read(x.k)
        Dv = x.v.shape[2]
        right = torch.cat([x.v, self.read_k], dim=2).mul_(beta)  # [m, C, Dv + Dk]
        solved = _solve(self.system, right)
        self.solved_v, self.solved_k = solved[..., :Dv], solved[..., Dv:]

    def states(
        self, segment: Segment, carry: Tensor | None, boundary: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return U [m, C, Dv], the states before the chunks and the one after the segment."""
        total, write_k = self.x.decay.total, self.x.write_k
        R = self.beta.shape[0] // segment.chunks
        U = torch.empty_like(self.x.v)

        def update(c: int, S: Tensor) -> Tensor:
            here = slice(c * R, (c + 1) * R)
            U[here] = torch.baddbmm(self.solved_v[here], self.solved_k[here], S, alpha=-1)
            S = S if total is None else S * total[here]
            return torch.baddbmm(S, write_k[here].mT, U[here])

        states, carry = scan_forward(segment, carry, boundary, update)
        return U, states.flatten(0, 1), carry


def _load(
    layout: Layout, segment: Segment, q: Tensor, k: Tensor, v: Tensor,
    log_decay: Tensor | None, beta: Tensor, scale: float,
) -> DeltaChunks:  # fmt: skip
    x = Chunks.load(layout, segment, q, k, v, log_decay, scale)
    return DeltaChunks(x, layout.load(beta[..., None], segment))


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, the final state, and where `save` the states that backward needs."""
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    boundary, saved = new_states(layout, initial_state, cu_seqlens, False, save)
    o = layout.output_like(v, layout.H, layout.Dv, q.dtype)
    for segments in layout.segments():
        carry = None
        for segment in segments:
            if save and segment.saved_at is not None:
                assert carry is not None
                saved[segment.saved_at, segment.rows] = carry.unflatten(0, (-1, layout.H))
            chunks = _load(layout, segment, q, k, v, log_decay, beta, scale)
            x = chunks.x
            U, states, carry = chunks.states(segment, carry, boundary)
            out = torch.bmm(x.decay.scores(x.q, x.k), U).baddbmm_(x.read_q, states)
            layout.store(out, o, segment)
    return o, boundary, saved


def backward(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor,
    log_decay: Tensor | None, beta: Tensor, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_decay, beta and the initial state (empty if None)."""
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    dq = layout.output_like(q, q.shape[2], layout.Dk, q.dtype)
    dk = layout.output_like(k, k.shape[2], layout.Dk, k.dtype)
    dv = layout.output_like(v, v.shape[2], layout.Dv, v.dtype)
    d_beta = layout.output_like(beta, layout.H, 1, beta.dtype)
    d_decay = LogDecayGradient(layout, log_decay)
    starts, _ = new_states(layout, initial_state, cu_seqlens, False, False)
    d_boundary = grad_state.clone(memory_format=torch.contiguous_format)
    for segments in layout.segments():
        Z: Tensor | None = None
        for segment in reversed(segments):
            chunks = _load(layout, segment, q, k, v, log_decay, beta, scale)
            S = None
            if segment.saved_at is not None:
                S = saved[segment.saved_at, segment.rows].flatten(0, 1)  # [R, ...]
            U, states, _ = chunks.states(segment, S, starts.clone())
            G = layout.load(grad_o, segment)
            Z, dq_, dk_, dv_, d_beta_ = _segment_backward(
                chunks, G, U, states, segment, Z, d_boundary
            )
            layout.store(dq_.mul_(scale), dq, segment)
            layout.store(dk_, dk, segment)
            layout.store(dv_, dv, segment)
            layout.store(d_beta_, d_beta, segment)
            d_decay.store(chunks.x.decay, segment)
    d_initial = d_boundary if initial_state is not None else q.new_empty(0)
    return dq, dk, dv, d_decay.out, d_beta[..., 0], d_initial


def _segment_backward(
    chunks: DeltaChunks, G: Tensor, U: Tensor, states: Tensor, segment: Segment,
    Z: Tensor | None, d_boundary: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradient of the state before the segment, and those of q, k, v and beta."""
    x, beta, decay = chunks.x, chunks.beta, chunks.x.decay
    Dv = x.v.shape[2]
    scores = decay.scores(x.q, x.k)
    # M^-T of both parts of dU at once; only dR = right_v + right_k Z waits for Z.
    right = torch.cat([torch.bmm(scores.mT, G), x.write_k], dim=2)  # [m, C, Dv + Dk]
    right = _solve(chunks.system, right, transposed=True)
    right_v, right_k = right[..., :Dv], right[..., Dv:]
    from_output = torch.bmm(x.read_q.mT, G)  # [m, Dk, Dv]
    beta_read_k = chunks.read_k * beta
    dR = torch.empty_like(x.v)
    R = beta.shape[0] // segment.chunks

    def update(c: int, Z: Tensor) -> Tensor:
        here = slice(c * R, (c + 1) * R)
        dR[here] = torch.baddbmm(right_v[here], right_k[here], Z)
        Z = Z if decay.total is None else Z * decay.total[here]
        return torch.baddbmm(Z + from_output[here], beta_read_k[here].mT, dR[here], alpha=-1)

    Zs, Z = scan_backward(segment, Z, d_boundary, update)
    Zs = Zs.flatten(0, 1)  # [m, Dk, Dv]

    dv = dR * beta
    d_read_k = -torch.bmm(dv, states.mT)
    remaining = torch.baddbmm(x.v, chunks.read_k, states, alpha=-1)  # V - read(k) S
    d_system = torch.bmm(dR, U.mT).neg_().tril_(-1)
    d_beta = (dR * remaining).sum(2, keepdim=True)
    d_beta += (d_system * chunks.keys).sum(2, keepdim=True)

    d_scores = torch.bmm(G, U.mT).tril_()
    dq, dk = decay.scores_backward(d_scores, x.q, x.k)
    d_row, d_column = decay.scores_backward(d_system.mul_(beta), x.k, x.k)
    d_read = torch.bmm(G, states.mT)
    d_write = torch.bmm(U, Zs.mT)
    dq += decay.read(d_read)
    dk += d_row.add_(d_column).add_(decay.read(d_read_k)).add_(decay.write(d_write))
    if decay.total is not None:
        decay.add_read(x.read_q * d_read + chunks.read_k * d_read_k)
        decay.add_write(x.write_k * d_write)
        decay.add_total(states, Zs)
    return Z, dq, dk, dv, d_beta
