"""The additive recurrence on the native kernels: additive_{forward,backward,noncausal}.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.cpu import layout, segment


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, the final state, and where `save` the states that backward starts from."""
    affine = bias != 0.0 or normalize
    o, state, saved = layout.results(q, k, v, cu_seqlens, affine, save and causal)
    torch.ops.linattn_cpu.additive_forward(
        q, k, v, log_decay, mask,
        None if initial_state is None else initial_state.contiguous(),
        layout.bounds_of(cu_seqlens, q.shape[1]),
        scale, bias, normalize, causal, segment(q.shape[3]), o, state,
        saved if save and causal else None,
    )  # fmt: skip
    return o, state, saved


def backward(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, log_decay and the initial state (empty where None)."""
    H = layout.heads(q, k, v)
    dq, dk, dv = (layout.gradient_of(x, H) for x in (q, k, v))
    d_decay = layout.gradient_of_decay(log_decay, grad_state.shape[0])
    d_initial = None if initial_state is None else torch.empty_like(
        grad_state, memory_format=torch.contiguous_format)  # fmt: skip
    torch.ops.linattn_cpu.additive_backward(
        grad_o, grad_state.contiguous(), state, saved, q, k, v, log_decay, mask,
        None if initial_state is None else initial_state.contiguous(),
        layout.bounds_of(cu_seqlens, q.shape[1]),
        scale, bias, normalize, causal, segment(q.shape[3]), dq, dk, dv, d_decay, d_initial,
    )  # fmt: skip
    return (
        dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype),
        layout.finish_decay(d_decay, log_decay, grad_state),
        grad_state.new_empty(0) if d_initial is None else d_initial,
    )  # fmt: skip
