"""The additive form where every token sees all: one sum over the tokens, read by each of them.

    S = sum_j k~_j v~_j^T        o_i = S^T q~_i   [ / the last output: the sum of the weights ]

in the homogeneous coordinates of the affine kernel, used by their parts as in `additive.py`.
Backward: dS = sum_i q~_i g~_i^T, dq~ = S g~, dk~ = dS v~, dv~ = dS^T k~. Two passes over the
tokens each way, a segment at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.chunked.chunks import Chunks, Kernel
from linattn.chunked.layout import Layout, Segment, new_states
from linattn.chunked.scan import scan_forward


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bias: float, normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the state, the sum over all tokens."""
    kernel = Kernel(bias, normalize)
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    S, _ = new_states(layout, initial_state, cu_seqlens, kernel.affine, False)
    o = layout.output_like(v, layout.H, layout.Dv, q.dtype)

    def load(segment: Segment) -> Chunks:
        return Chunks.load(layout, segment, q, k, v, None, scale)

    for segments in layout.segments():
        _sum_chunks(segments, S, lambda segment: load(segment).written(kernel.affine))
        for segment in segments:
            x = load(segment)
            layout.store(_read(x, _of_each_chunk(S, segment), kernel)[0], o, segment)
    return o, S


def backward(
    grad_o: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    state: Tensor, cu_seqlens: Tensor | None, scale: float, bias: float, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and the initial state; `state` is the final one."""
    kernel = Kernel(bias, normalize)
    layout = Layout(q, v, max(q.shape[2], k.shape[2], v.shape[2]), mask, cu_seqlens)
    Dk, Dv = layout.Dk, layout.Dv
    dq = layout.output_like(q, q.shape[2], Dk, q.dtype)
    dk = layout.output_like(k, k.shape[2], Dk, k.dtype)
    dv = layout.output_like(v, v.shape[2], Dv, v.dtype)
    dS = grad_state.clone(memory_format=torch.contiguous_format)

    def load(segment: Segment) -> Chunks:
        return Chunks.load(layout, segment, q, k, v, None, scale)

    def read_backward(segment: Segment) -> Tensor:
        """Store dq; return what the segment's queries add to dS [m, Dk (+ 1), Dv (+ 1)]."""
        x, S = load(segment), _of_each_chunk(state, segment)
        G = layout.load(grad_o, segment)
        d_q = torch.empty_like(x.q)
        part = G.new_zeros(S.shape)
        if kernel.normalize:
            o, sums = _read(x, S, kernel)
            assert sums is not None
            G = G / sums
            r = (G * o).sum(2, keepdim=True)  # [m, C, 1]
            part[:, :Dk, Dv:] = -torch.bmm(x.q.mT, r)
            part[:, Dk:, Dv:] = -bias * r.sum(1, keepdim=True)
            torch.baddbmm(-r * S[:, :Dk, Dv:].mT, G, S[:, :Dk, :Dv].mT, out=d_q)
        else:
            torch.bmm(G, S[:, :Dk, :Dv].mT, out=d_q)
        part[:, :Dk, :Dv] = torch.bmm(x.q.mT, G)
        if kernel.affine:
            part[:, Dk:, :Dv] = bias * G.sum(1, keepdim=True)
        layout.store(d_q.mul_(scale), dq, segment)
        return part

    for segments in layout.segments():
        _sum_chunks(segments, dS, read_backward)
        for segment in segments:
            x, Z = load(segment), _of_each_chunk(dS, segment)
            d_k = torch.bmm(x.v, Z[:, :Dk, :Dv].mT)
            d_v = torch.bmm(x.k, Z[:, :Dk, :Dv])
            if kernel.affine:
                d_k += Z[:, :Dk, Dv:].mT
                d_v += Z[:, Dk:, :Dv]
            layout.store(d_k, dk, segment)
            layout.store(d_v, dv, segment)
    return dq, dk, dv, dS


def _read(x: Chunks, S: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [m, C, Dv] and, if they are normalised, the sums of weights [m, C, 1]."""
    Dk, Dv = x.k.shape[2], x.v.shape[2]
    out = torch.bmm(x.q, S[:, :Dk, :Dv])
    if kernel.bias != 0.0:
        out += kernel.bias * S[:, Dk:, :Dv]
    if not kernel.normalize:
        return out, None
    sums = torch.bmm(x.q, S[:, :Dk, Dv:])
    if kernel.bias != 0.0:
        sums += kernel.bias * S[:, Dk:, Dv:]
    sums = sums if x.one is None else torch.where(x.one > 0, sums, 1)
    return out / sums, sums


def _sum_chunks(segments: list[Segment], total: Tensor, part: Callable[[Segment], Tensor]) -> None:
    """Add to total [sequences, H, ...] the parts [m, ...] of the chunks of each sequence."""
    carry: Tensor | None = None
    for segment in segments:
        parts = part(segment).unflatten(0, (segment.chunks, -1))  # [chunks, R, ...]

        def update(c: int, S: Tensor, parts: Tensor = parts) -> Tensor:
            return S + parts[c]

        _, carry = scan_forward(segment, carry, total, update)


def _of_each_chunk(state: Tensor, segment: Segment) -> Tensor:
    """Return, for each chunk, the state of the sequence it belongs to: [m, Dk (+ 1), Dv (+ 1)]."""
    if segment.index is None:
        S = state[segment.rows].flatten(0, 1)  # [R, ...]
        return S.expand(segment.chunks, *S.shape).flatten(0, 1)
    return state[segment.sequences].flatten(0, 1)
