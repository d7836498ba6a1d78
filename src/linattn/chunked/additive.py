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

import torch
from torch import Tensor

from linattn.chunked import additive_noncausal
from linattn.chunked.chunks import Chunks, Kernel
from linattn.chunked.layout import Layout, Segment, new_states
from linattn.chunked.log_decay_gradient import LogDecayGradient
from linattn.chunked.scan import scan_backward


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, the final state, and where `save` the states that backward needs."""
    if not causal:
        o, state = additive_noncausal.forward(
            q, k, v, mask, initial_state, cu_seqlens, scale, bias, normalize
        )
        return o, state, state.new_empty(0)
    kernel = Kernel(bias, normalize)
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    H, Dk, Dv = layout.H, layout.Dk, layout.Dv
    boundary, saved = new_states(layout, initial_state, cu_seqlens, kernel.affine, save)
    o = layout.output_like(v, H, Dv, q.dtype)
    for segments in layout.segments():
        carry = None
        for segment in segments:
            if save and segment.saved_at is not None:
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
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_decay and the initial state (empty where None)."""
    if not causal:
        dq, dk, dv, d_initial = additive_noncausal.backward(
            grad_o, grad_state, q, k, v, mask, state, cu_seqlens, scale, bias, normalize
        )
        none = state.new_empty(0)
        return dq, dk, dv, none, state.new_empty(0) if initial_state is None else d_initial
    kernel = Kernel(bias, normalize)
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    dq = layout.output_like(q, q.shape[2], layout.Dk, q.dtype)
    dk = layout.output_like(k, k.shape[2], layout.Dk, k.dtype)
    dv = layout.output_like(v, v.shape[2], layout.Dv, v.dtype)
    d_decay = LogDecayGradient(layout, log_decay)
    starts, _ = new_states(layout, initial_state, cu_seqlens, kernel.affine, False)
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
