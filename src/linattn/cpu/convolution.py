"""The short causal convolution on the native kernels: convolution.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from linattn._validation import state_dtype
from linattn.cpu import layout
from linattn.cpu.eager import MOST_TOKENS, is_plain


@functools.cache
def _step() -> Callable[..., Tensor | None]:
    return torch.ops.linattn_cpu.convolution_step.default


def decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, mask: Tensor | None,
    initial_state: Tensor | None, out_state: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return o and the state of a few tokens without gradients; None: not a call for this.

    Nothing has been checked before: what the library finds wrong is None as well, and left to the
    checks that have words for it. They take several times as long as the kernel.
    """
    if not is_plain(x, weight, bias, mask, initial_state, out_state):
        return None
    if x.dim() != 3 or weight.dim() != 2 or activation not in (None, "silu"):
        return None
    B, N, C = x.shape
    taps = weight.shape[1]
    if not 1 <= N <= MOST_TOKENS or taps < 1:
        return None
    state = x.new_empty(B, taps - 1, C) if out_state is None else out_state
    if state.is_neg():  # torch's fallback for it cannot write in place
        return None
    silu = activation == "silu"
    try:
        o = _step()(x, weight, bias, silu, mask, initial_state, state)
    except RuntimeError:  # a tensor of a device, layout or dtype that the library cannot take
        return None
    if o is None:
        return None
    if out_state is not None:  # so that autograd notices if it had kept the state
        increment_version(out_state)
    return o, state


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
