"""The short causal convolution in plain torch, with its gradient: one product a tap.

Every sequence gets its W - 1 earlier inputs in front, and packed ones come one after the other in
one longer row. Then it is one convolution, and no output that is kept sees another sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn._validation import sequence_bounds, state_dtype


class _Rows:
    """Where tokens and states stand in the longer row."""

    def __init__(self, x: Tensor, taps: int, cu_seqlens: Tensor | None):
        self.before, self.B, self.N = taps - 1, x.shape[0], x.shape[1]
        self.tokens: Tensor | None = None  # [N] and [S, W - 1] places, of packed sequences
        if cu_seqlens is None:
            return
        sequence_bounds(cu_seqlens, x.shape[1])
        starts = cu_seqlens.to(x.device, torch.int64)
        places = torch.arange(x.shape[1], device=x.device)
        sequence = torch.searchsorted(starts[1:], places, right=True)
        self.tokens = places + self.before * (sequence + 1)
        behind = torch.arange(len(starts) - 1, device=x.device) * self.before
        first = (starts[:-1] + behind)[:, None]
        self.first = first + torch.arange(self.before, device=x.device)
        self.last = self.first + (starts[1:] - starts[:-1])[:, None]

    def join(self, x: Tensor | None, states: Tensor | None, like: Tensor, *, final: bool) -> Tensor:
        """Return the longer row of x and the initial (or `final`) states; None counts as 0."""
        if self.tokens is None:
            long = like.new_zeros(self.B, self.N + self.before, like.shape[-1])
            if x is not None:
                long[:, self.before :] = x
            if states is not None:
                long[:, self.N if final else 0 :][:, : self.before] += states
            return long
        length = self.N + self.before * len(self.first)
        long = like.new_zeros(1, length, like.shape[-1])
        if x is not None:
            long[:, self.tokens] = x
        if states is not None:
            rows = (self.last if final else self.first).flatten()
            long[0].index_add_(0, rows, states.flatten(0, 1))
        return long

    def of_tokens(self, long: Tensor) -> Tensor:
        """Return the rows [B, N, C] of the tokens."""
        return long[:, self.before :] if self.tokens is None else long[:, self.tokens]

    def states(self, long: Tensor, *, final: bool) -> Tensor:
        """Return the rows [B or S, W - 1, C] before the first tokens, or the last ones."""
        if self.tokens is not None:
            return long[0][self.last if final else self.first]
        return long[:, self.N if final else 0 :][:, : self.before]


def _before_activation(long: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve the longer row: [B, L, C] to [B, L - W + 1, C]."""
    W = weight.shape[1]
    length = long.shape[1] - W + 1
    y = long[:, :length] * weight[:, 0]
    for w in range(1, W):
        y.addcmul_(long[:, w : w + length], weight[:, w])
    return y if bias is None else y.add_(bias)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state."""
    dtype, rows = state_dtype(x.dtype), _Rows(x, weight.shape[1], cu_seqlens)
    long, weight, bias = _prepare(x, weight, bias, mask, initial_state, rows, dtype)
    y = _before_activation(long, weight, bias)
    if silu:
        y = torch.nn.functional.silu(y)
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    o.copy_(_of_outputs(y, rows))
    if mask is not None:
        o.masked_fill_(~mask[..., None], 0)
    return o, rows.states(long, final=True).to(x.dtype).contiguous()


def backward(
    grad_o: Tensor, grad_state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    silu: bool, mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, weight, bias and the initial state (empty where None)."""
    dtype, W = state_dtype(x.dtype), weight.shape[1]
    rows = _Rows(x, W, cu_seqlens)
    long, wide, wide_bias = _prepare(x, weight, bias, mask, initial_state, rows, dtype)
    g = grad_o.to(dtype)
    if mask is not None:
        g = torch.where(mask[..., None], g, 0)
    dy = rows.join(g, None, long, final=False)[:, W - 1 :]  # [B, L - W + 1, C]
    if silu:
        y = _before_activation(long, wide, wide_bias)
        s = torch.sigmoid(y)
        dy = dy * (s * (1 + y * (1 - s)))
    length = dy.shape[1]
    d_long = rows.join(None, grad_state.to(dtype), long, final=True)
    for w in range(W):
        d_long[:, w : w + length].addcmul_(dy, wide[:, w])
    taps = [(dy * long[:, w : w + length]).sum((0, 1)) for w in range(W)]
    dx = rows.of_tokens(d_long)
    if mask is not None:
        dx = torch.where(mask[..., None], dx, 0)
    nothing = x.new_empty(0)
    return (
        dx.to(x.dtype).contiguous(), torch.stack(taps, dim=1).to(weight.dtype),
        nothing if bias is None else dy.sum((0, 1)).to(bias.dtype),
        nothing if initial_state is None
        else rows.states(d_long, final=False).to(x.dtype).contiguous(),
    )  # fmt: skip


def _prepare(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, rows: _Rows, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the longer row, weight and bias, in the dtype of the sums."""
    x = x.to(dtype)
    if mask is not None:
        x = torch.where(mask[..., None], x, 0)
    states = None if initial_state is None else initial_state.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return rows.join(x, states, x, final=False), weight.to(dtype), bias


def _of_outputs(y: Tensor, rows: _Rows) -> Tensor:
    """Return the outputs of the tokens among those of the longer row."""
    return y if rows.tokens is None else y[:, rows.tokens - rows.before]
