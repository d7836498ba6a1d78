"""The short causal convolution on the native kernels: convolution.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn._validation import state_dtype
from linattn.cpu import layout


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = x.new_empty(sequences, weight.shape[1] - 1, x.shape[2])
    torch.ops.linattn_cpu.convolution_forward(
        x, weight, bias, silu, mask, initial_state, layout.bounds_of(cu_seqlens, x.shape[1]),
        o, state,
    )  # fmt: skip
    return o, state


def backward(
    grad_o: Tensor, grad_state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    silu: bool, mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, weight, bias and the initial state (empty where None)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    nothing = x.new_empty(0)
    d_initial = None if initial_state is None else x.new_empty(initial_state.shape)
    parts = torch.get_num_threads()
    dweight = x.new_zeros(parts, weight.shape[1] + 1, x.shape[2], dtype=state_dtype(x.dtype))
    torch.ops.linattn_cpu.convolution_backward(
        grad_o, grad_state, x, weight, bias, silu, mask, initial_state,
        layout.bounds_of(cu_seqlens, x.shape[1]), dx, dweight, d_initial,
    )  # fmt: skip
    sums = dweight.sum(0)  # row w: of the tap that meets x_{t-w}; the last row: of the bias
    return (
        dx, sums[:-1].flip(0).t().to(weight.dtype).contiguous(),
        nothing if bias is None else sums[-1].to(bias.dtype),
        nothing if d_initial is None else d_initial,
    )  # fmt: skip
