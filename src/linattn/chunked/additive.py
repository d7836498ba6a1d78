"""The causal additive recurrence by chunks, plain or affine, and its gradient.

One chunk, its queries already multiplied by scale, S the state before it (spec: *Towards Making
Linear Attention Usable* for the affine kernel, MetaLA for the decays):

    W = scores(q, k) + b D                      D = exp(L_i - L_j), j <= i; 1 without a decay
    O = W V + read(q) S + b exp(L) (sum v)      the sums are parts of the affine state
    S <- total S + write(k)^T V

The affine state [Dk + 1, Dv + 1] is used by its parts, not as a matrix one wider:

    S = [ sum k v^T | sum k ]                   normaliser = W 1 + read(q) sum k + b exp(L) count
        [ sum v     | count ]

Backward, with G the gradient of O (normalised: of the numerator, G / normaliser, and
r = G . o that of the normaliser, negated) and Z the gradient of the state after the chunk:

    dW = G V^T - r                              d read(q) = G S^T - r (sum k)^T
    dV = W^T G + write(k) Z                     d write(k) = V Z^T
    Z <- total Z + read(q)^T G
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.chunked.decay import NoDecay, make_decay
from linattn.chunked.layout import Layout, Segment, new_states
from linattn.chunked.log_decay_gradient import LogDecayGradient
from linattn.chunked.scan import scan_backward, scan_forward


@dataclass(frozen=True)
class Kernel:
    """The weight of key j for query i: q . k + bias, divided by its sum or not."""

    bias: float
    normalize: bool

    @property
    def affine(self) -> bool:
        """Whether the state has the row and column of the constant coordinate."""
        return self.bias != 0.0 or self.normalize


@dataclass
class Chunks:
    """What forward and backward both need of the chunks of a segment; all [m, C, ...]."""

    q: Tensor  # times scale
    k: Tensor
    v: Tensor
    one: Tensor | None  # [m, C, 1] the constant coordinate: 0 where there is no token; None: all 1
    decay: NoDecay
    read_q: Tensor
    write_k: Tensor

    @classmethod
    def load(
        cls, layout: Layout, segment: Segment, q: Tensor, k: Tensor, v: Tensor,
        log_decay: Tensor | None, scale: float,
    ) -> Chunks:  # fmt: skip
        """Bring one segment inside."""
        decay = make_decay(layout.load_log_decay(log_decay, segment), layout.C)
        q_ = layout.load(q, segment).mul_(scale)
        k_, v_ = layout.load(k, segment), layout.load(v, segment)
        return cls(q_, k_, v_, layout.present(segment), decay, decay.read(q_), decay.write(k_))

    def weights(self, bias: float) -> Tensor:
        """Return W [m, C, C], 0 above the diagonal."""
        weights = self.decay.scores(self.q, self.k)
        return weights if bias == 0.0 else weights.add_(self.constant_weights(), alpha=bias)

    def constant_weights(self) -> Tensor:
        """Return D times the constant coordinate of the keys: what the bias multiplies."""
        C = self.q.shape[1]
        D = self.decay.matrix
        D = torch.ones(1, C, C, dtype=self.q.dtype, device=self.q.device).tril() if D is None else D
        return D.expand(self.q.shape[0], C, C) if self.one is None else D * self.one.mT

    def read_one(self, bias: float) -> Tensor:
        """Return the constant coordinate of the queries as it reads the state: b exp(L)."""
        factor = self.decay.read_factor
        return self.q.new_full((1, 1, 1), bias) if factor is None else bias * factor

    def write_one(self) -> Tensor:
        """Return the constant coordinate of the keys as it stands after the chunk [m, C, 1]."""
        factor, one = self.decay.write_factor, self.one
        if factor is None:
            return torch.ones_like(self.q[..., :1]) if one is None else one
        return factor if one is None else factor * one

    def written(self, affine: bool) -> Tensor:
        """Return what the chunk adds to the state [m, Dk (+ 1), Dv (+ 1)]."""
        if not affine:
            return torch.bmm(self.write_k.mT, self.v)
        Dk, Dv = self.k.shape[2], self.v.shape[2]
        out = self.q.new_empty(self.q.shape[0], Dk + 1, Dv + 1)
        one = self.write_one()
        out[:, :Dk, :Dv] = torch.bmm(self.write_k.mT, self.v)
        out[:, Dk:, :Dv] = torch.bmm(one.mT, self.v)
        out[:, :Dk, Dv] = self.write_k.sum(1)
        out[:, Dk, Dv] = one.sum((1, 2))
        return out

    def states(
        self, segment: Segment, carry: Tensor | None, boundary: Tensor, affine: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the states before the chunks [m, ...] and the one after the segment."""
        written = self.written(affine).unflatten(0, (segment.chunks, -1))
        total, R = self.decay.total, written.shape[1]

        def update(c: int, S: Tensor) -> Tensor:
            if total is None:
                return S + written[c]
            return torch.addcmul(written[c], S, total[c * R : (c + 1) * R])

        states, carry = scan_forward(segment, carry, boundary, update)
        return states.flatten(0, 1), carry


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, the final state and the states before each segment [segments, B, H, ...]."""
    kernel = Kernel(bias, normalize)
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    H, Dk, Dv = layout.H, layout.Dk, layout.Dv
    boundary, saved = new_states(layout, initial_state, cu_seqlens, kernel.affine)
    o = layout.output_like(v, H, Dv, q.dtype)
    for segments in layout.segments():
        carry = None
        for segment in segments:
            if segment.saved_at is not None:
                assert carry is not None
                saved[segment.saved_at, segment.rows] = carry.unflatten(0, (-1, H))
            x = Chunks.load(layout, segment, q, k, v, log_decay, scale)
            states, carry = x.states(segment, carry, boundary, kernel.affine)
            weights = x.weights(bias)
            out = torch.baddbmm(torch.bmm(weights, x.v), x.read_q, states[:, :Dk, :Dv])
            if bias != 0.0:
                out.addcmul_(x.read_one(bias), states[:, Dk:, :Dv])
            if normalize:
                out /= _normaliser(x, weights, states, bias)
            layout.store(out, o, segment)
    return o, boundary, saved


def _normaliser(x: Chunks, weights: Tensor, states: Tensor, bias: float) -> Tensor:
    """Return the sum of the weights of each query [m, C, 1]; 1 where there is no token."""
    Dk, Dv = x.k.shape[2], x.v.shape[2]
    sums = weights.sum(2, keepdim=True).baddbmm_(x.read_q, states[:, :Dk, Dv:])
    if bias != 0.0:
        sums = sums.addcmul_(x.read_one(bias), states[:, Dk:, Dv:])
    return sums if x.one is None else torch.where(x.one > 0, sums, 1)


def backward(
    grad_o: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor,
    log_decay: Tensor | None, mask: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, saved: Tensor, scale: float, bias: float, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_decay and the initial state (empty where None)."""
    kernel = Kernel(bias, normalize)
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    dq = layout.output_like(q, q.shape[2], layout.Dk, q.dtype)
    dk = layout.output_like(k, k.shape[2], layout.Dk, k.dtype)
    dv = layout.output_like(v, v.shape[2], layout.Dv, v.dtype)
    d_decay = LogDecayGradient(layout, log_decay)
    starts, _ = new_states(layout, initial_state, cu_seqlens, kernel.affine)
    d_boundary = grad_state.clone(memory_format=torch.contiguous_format)
    for segments in layout.segments():
        Z: Tensor | None = None
        for segment in reversed(segments):
            x = Chunks.load(layout, segment, q, k, v, log_decay, scale)
            # A scratch copy: the scan leaves final states in the boundary that it is given.
            S = None
            if segment.saved_at is not None:
                S = saved[segment.saved_at, segment.rows].flatten(0, 1)  # [R, ...]
            states, _ = x.states(segment, S, starts.clone(), kernel.affine)
            G = layout.load(grad_o, segment)
            Z, dq_, dk_, dv_ = _segment_backward(x, G, states, kernel, segment, Z, d_boundary)
            layout.store(dq_.mul_(scale), dq, segment)
            layout.store(dk_, dk, segment)
            layout.store(dv_, dv, segment)
            d_decay.store(x.decay, segment)
    d_initial = d_boundary if initial_state is not None else q.new_empty(0)
    return dq, dk, dv, d_decay.out, d_initial


def _segment_backward(
    x: Chunks, G: Tensor, states: Tensor, kernel: Kernel, segment: Segment,
    Z: Tensor | None, d_boundary: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradient of the state before the segment, and those of q, k and v."""
    Dk, Dv, bias = x.k.shape[2], x.v.shape[2], kernel.bias
    weights = x.weights(bias)
    if kernel.normalize:
        G = G / _normaliser(x, weights, states, bias)
    d_weights = torch.bmm(G, x.v.mT)
    d_read = torch.bmm(G, states[:, :Dk, :Dv].mT)
    d_read_one = torch.bmm(G, states[:, Dk:, :Dv].mT) if bias != 0.0 else None
    r: Tensor | None = None
    if kernel.normalize:
        # r = G . o without having kept o: what the chunk's weights and the state gave to it.
        numerator = (weights * d_weights).sum(2, keepdim=True)
        numerator += (x.read_q * d_read).sum(2, keepdim=True)
        if d_read_one is not None:
            numerator += x.read_one(bias) * d_read_one
        r = numerator / _normaliser(x, weights, states, bias)  # [m, C, 1]
        d_weights -= r
        d_read -= r * states[:, :Dk, Dv:].mT
        if d_read_one is not None:
            d_read_one -= r * states[:, Dk:, Dv:]
    d_weights.tril_()

    # The gradient of the state, from the last chunk to the first.
    read_part = _read_part(x, G, r, kernel)
    read_part = read_part.unflatten(0, (segment.chunks, -1))
    total, R = x.decay.total, read_part.shape[1]

    def update(c: int, Z: Tensor) -> Tensor:
        if total is None:
            return Z + read_part[c]
        return torch.addcmul(read_part[c], Z, total[c * R : (c + 1) * R])

    Zs, Z = scan_backward(segment, Z, d_boundary, update)
    Zs = Zs.flatten(0, 1)  # [m, Dk (+ 1), Dv (+ 1)]

    dq, dk = x.decay.scores_backward(d_weights, x.q, x.k)
    dv = torch.bmm(weights.mT, G).baddbmm_(x.write_k, Zs[:, :Dk, :Dv])
    d_write = torch.bmm(x.v, Zs[:, :Dk, :Dv].mT)
    if kernel.affine:
        d_write += Zs[:, :Dk, Dv:].mT
        one = x.write_one()
        dv.addcmul_(one, Zs[:, Dk:, :Dv])
    dq += x.decay.read(d_read)
    dk += x.decay.write(d_write)

    if x.decay.total is not None:
        x.decay.add_read(x.read_q * d_read)
        x.decay.add_write(x.write_k * d_write)
        x.decay.add_total(states, Zs)
        if d_read_one is not None:
            x.decay.add_pairs(x.constant_weights() * d_weights * bias)
            x.decay.add_read(x.read_one(bias) * d_read_one)
        if kernel.affine:
            d_write_one = torch.bmm(x.v, Zs[:, Dk:, :Dv].mT) + Zs[:, Dk:, Dv:]
            x.decay.add_write(one * d_write_one)
    return Z, dq, dk, dv


def _read_part(x: Chunks, G: Tensor, r: Tensor | None, kernel: Kernel) -> Tensor:
    """Return what reading adds to the gradient of the state before: [m, Dk (+ 1), Dv (+ 1)]."""
    if not kernel.affine:
        return torch.bmm(x.read_q.mT, G)
    Dk, Dv = x.q.shape[2], x.v.shape[2]
    out = G.new_zeros(G.shape[0], Dk + 1, Dv + 1)
    out[:, :Dk, :Dv] = torch.bmm(x.read_q.mT, G)
    if kernel.bias != 0.0:
        out[:, Dk:, :Dv] = (x.read_one(kernel.bias) * G).sum(1, keepdim=True)
    if r is not None:
        out[:, :Dk, Dv:] = -torch.bmm(x.read_q.mT, r)
        if kernel.bias != 0.0:
            out[:, Dk:, Dv:] = -(x.read_one(kernel.bias) * r).sum(1, keepdim=True)
    return out
