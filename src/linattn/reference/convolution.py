"""The short causal convolution, token by token; see `linattn.causal_conv1d`.

x [B, N, C], weight [C, W], state [B, W - 1, C]: the last inputs, the oldest first.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from linattn._validation import sequence_bounds, state_dtype, without_autocast


def token_loop(
    x: Tensor, weight: Tensor, bias: Tensor | None, S: Tensor, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return o [B, N, C] and the state after the last token."""
    o = []
    for t in range(x.shape[1]):
        window = torch.cat([S, x[:, t : t + 1]], dim=1)  # [B, W, C]: x_{t-W+1} ... x_t
        o_t = torch.einsum("bwc,cw->bc", window, weight)
        if bias is not None:
            o_t = o_t + bias
        o.append(o_t * torch.sigmoid(o_t) if silu else o_t)
        S = window[:, 1:]
    return torch.stack(o, dim=1) if o else x, S


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state, in x's dtype."""
    dtype, sums = x.dtype, state_dtype(x.dtype)
    with without_autocast(x):
        present = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        x = torch.where(present[..., None], x.to(sums), 0)
        weight = weight.to(sums)
        bias = None if bias is None else bias.to(sums)
        bounds = [0, x.shape[1]]
        if cu_seqlens is not None:
            bounds = sequence_bounds(cu_seqlens, x.shape[1])
        outputs, states = [], []
        for i, (start, stop) in enumerate(pairwise(bounds)):
            S = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
            if initial_state is not None:
                S = initial_state if cu_seqlens is None else initial_state[i : i + 1]
            o, S = token_loop(x[:, start:stop], weight, bias, S.to(sums), silu=silu)
            outputs.append(o)
            states.append(S)
        o = torch.where(present[..., None], torch.cat(outputs, dim=1), 0)
    return o.to(dtype), torch.cat(states, dim=0).to(dtype)
