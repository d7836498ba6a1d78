"""Where tokens stand: their positions, and the sequences packed in one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn._validation import check_cu_seqlens, reject
from linattn.models.caching import tokens_seen


def packed_bounds(
    given: Tensor | None,
    positions: Tensor | None,
    mask: Tensor | None,
    cache: object | None,
    x: Tensor,
) -> Tensor | None:
    """Return cu_seqlens [S + 1] of the sequences packed in x [1, N, ...], or None.

    They are given, or positions [1, N] that start again say so, as transformers' collators have
    it. Reading positions takes a look at their values: a graph compiled whole wants them given.

    Raises:
        ValueError: with a cache, or in more than one row: no mixer could keep them apart.
    """
    if given is None:
        if positions is None or mask is not None or cache is not None or positions.dim() != 2:
            return None
        starts = positions.diff(dim=1) != 1  # [B, N - 1]
        if not bool(starts.any()):
            return None
        if positions.shape[0] != 1:
            got = f"{positions.shape[0]} rows that start again inside"
            reject("position_ids", got, "one packed row, B = 1, or an attention_mask for padding")
        inner = starts[0].nonzero()[:, 0] + 1
        ends = torch.tensor([0, positions.shape[1]], device=inner.device)
        return torch.cat([ends[:1], inner, ends[1:]])
    if cache is not None:
        reject("cu_seq_lens_q", "packed sequences with a cache", "one sequence a row to decode")
    if mask is not None and not bool(mask.bool().all()):
        reject("cu_seq_lens_q", "packed sequences with padding", "no attention_mask")
    check_cu_seqlens(given, x, "input_ids")
    return given


def token_positions(
    given: Tensor | None, mask: Tensor | None, cache: Any, bounds: Tensor | None, x: Tensor
) -> Tensor:
    """Return the positions [1, N] or [B, N] of the tokens of x [B, N, dim]."""
    N = x.shape[1]
    if given is not None:
        return given
    if mask is not None and mask.dim() == 2 and mask.shape[1] >= N:
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -N:]
    tokens = torch.arange(N, device=x.device)[None]
    if bounds is not None:
        starts = bounds.to(x.device, torch.int64)
        return tokens - starts[torch.searchsorted(starts[1:], tokens, right=True)]
    if cache is None:
        return tokens
    if all(cache.is_linear):
        return tokens + tokens_seen(cache).to(x.device)
    return tokens + cache.get_seq_length()


def without_first_labels(labels: Tensor, bounds: Tensor | None) -> Tensor:
    """Return labels [1, N] with -100 at the first token of every sequence of bounds [S + 1]."""
    if bounds is None:
        return labels
    first = torch.zeros(labels.shape[1] + 1, dtype=torch.bool, device=labels.device)
    first[bounds.to(labels.device)] = True
    return labels.masked_fill(first[:-1], -100)
