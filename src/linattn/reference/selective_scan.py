"""Mamba-1's selective scan, token by token; see `linattn.selective_scan`.

x, dt, z [B, N, D], A [D, n], b, c [B, N, n], state [B, D, n].
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from linattn._validation import sequence_bounds, state_dtype, without_autocast


def token_loop(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y [B, N, D] and the state after the last token."""
    y = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)  # [B, D, n]
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        y.append(torch.einsum("bdn,bn->bd", h, c[:, t]))
    return torch.stack(y, dim=1) if y else x, h


def forward(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, mask: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o in x's dtype and the final state."""
    dtype, sums = x.dtype, state_dtype(x.dtype)
    with without_autocast(x):
        present = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        present = present[..., None]
        x, dt, b, c = (torch.where(present, y.to(sums), 0) for y in (x, dt, b, c))
        A = A.to(sums)
        if dt_bias is not None:
            dt = dt + dt_bias.to(sums)
        if softplus:
            dt = torch.logaddexp(dt, torch.zeros_like(dt))
        dt = torch.where(present, dt, 0)  # exp(0) = 1 and nothing enters
        bounds = [0, x.shape[1]]
        if cu_seqlens is not None:
            bounds = sequence_bounds(cu_seqlens, x.shape[1])
        outputs, states = [], []
        for i, (start, stop) in enumerate(pairwise(bounds)):
            h = x.new_zeros(x.shape[0], *A.shape)
            if initial_state is not None:
                h = initial_state if cu_seqlens is None else initial_state[i : i + 1]
            some = slice(start, stop)
            y, h = token_loop(x[:, some], dt[:, some], A, b[:, some], c[:, some], h)
            outputs.append(y)
            states.append(h)
        o = torch.cat(outputs, dim=1)
        if skip is not None:
            o = o + skip.to(sums) * x
        if z is not None:
            gate = torch.where(present, z.to(sums), 0)
            o = o * gate * torch.sigmoid(gate)
        o = torch.where(present, o, 0)
    return o.to(dtype), torch.cat(states, dim=0)
