"""The short causal convolution on Triton kernels (taps.py), forward and backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from linattn._validation import sequence_bounds
from linattn.triton.taps import (
    before_activation_kernel,
    final_state_kernel,
    forward_kernel,
    inputs_gradient_kernel,
    state_gradient_kernel,
)

TOKENS, CHANNELS = 64, 64  # of a tile


def _blocks(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return blocks [blocks, 5]: row, first token, begin, end, sequence; bounds [sequences, 3]."""
    B, N, _ = x.shape
    if cu_seqlens is None:
        rows = torch.arange(B)
        begin, end = torch.zeros_like(rows), torch.full_like(rows, N)
    else:
        bounds = torch.tensor(sequence_bounds(cu_seqlens, N))
        begin, end = bounds[:-1], bounds[1:]
        rows = torch.zeros_like(begin)
    counts = (end - begin + TOKENS - 1) // TOKENS
    of = torch.arange(len(counts)).repeat_interleave(counts)
    place = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]
    table = torch.stack([rows[of], begin[of] + TOKENS * place, begin[of], end[of], of], dim=1)
    return table.to(x.device), torch.stack([rows, begin, end], dim=1).to(x.device)


def _strided(x: Tensor | None, like: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor as kernels take it; for None one that they do not look at."""
    x = like if x is None else x
    return (x.view(torch.uint8) if x.dtype == torch.bool else x), tuple(x.stride())


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state."""
    (_, _, C), W = x.shape, weight.shape[1]
    table, bounds = _blocks(x, cu_seqlens)
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(len(bounds), W - 1, C, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(C, CHANNELS)
    given = (_strided(mask, x), _strided(initial_state, x))
    masked, state = mask is not None, initial_state is not None
    options = {"BC": CHANNELS, "W": W, "MASKED": masked, "STATE": state}
    if len(table) > 0 and C > 0:
        forward_kernel[(len(table), tiles)](
            _strided(x, x), _strided(weight, x), _strided(bias, x), *given, _strided(o, x), table,
            C, T=TOKENS, num_warps=8, BIAS=bias is not None, SILU=silu, **options,
        )  # fmt: skip
    if final.numel() > 0:
        final_state_kernel[(len(bounds), tiles)](
            _strided(x, x), *given, final, bounds, C, T=triton.next_power_of_2(W - 1), **options
        )
    return o, final


def backward(
    grad_o: Tensor, grad_state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    silu: bool, mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, weight, bias and the initial state (empty where None)."""
    (_, _, C), W = x.shape, weight.shape[1]
    table, bounds = _blocks(x, cu_seqlens)
    tiles = triton.cdiv(C, CHANNELS)
    dy = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    parts = torch.empty(len(table), W + 1, C, dtype=torch.float32, device=x.device)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_state = grad_state.contiguous()
    weight_, mask_ = _strided(weight, x), _strided(mask, x)
    masked, dy_ = mask is not None, _strided(dy, x)
    if len(table) > 0 and C > 0:
        before_activation_kernel[(len(table), tiles)](
            _strided(x, x), weight_, _strided(bias, x), mask_, _strided(initial_state, x),
            _strided(grad_o, x), dy_, parts, table, C, T=TOKENS, num_warps=8, BC=CHANNELS, W=W,
            BIAS=bias is not None, SILU=silu, MASKED=masked, STATE=initial_state is not None,
        )  # fmt: skip
        inputs_gradient_kernel[(len(table), tiles)](
            weight_, dy_, grad_state, mask_, _strided(dx, x), table, C, T=TOKENS, num_warps=8,
            BC=CHANNELS, W=W, MASKED=masked,
        )  # fmt: skip
    sums = parts.sum(0)
    nothing = x.new_empty(0)
    d_initial = nothing
    if initial_state is not None:
        d_initial = torch.empty_like(initial_state, memory_format=torch.contiguous_format)
        if d_initial.numel() > 0:
            state_gradient_kernel[(len(bounds), tiles)](
                weight_, dy_, grad_state, d_initial, bounds, C,
                T=triton.next_power_of_2(W - 1), BC=CHANNELS, W=W,
            )  # fmt: skip
    return (
        dx, sums[:W].mT.to(weight.dtype).contiguous(),
        nothing if bias is None else sums[W].to(bias.dtype), d_initial,
    )  # fmt: skip
