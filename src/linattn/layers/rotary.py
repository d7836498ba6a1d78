"""Rotary position embedding, RoPE (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn._validation import check_cu_seqlens, reject, require_number


def rotary(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Turn channels i and i + D / 2 of x by positions * base^(-2 i / D) radians, together.

    After it q . k depends on the difference of two positions alone. Source: Su et al., *RoFormer*
    (2021), eq. 34, with halves where the paper has neighbours, as in GPT-NeoX and Llama.

    Args:
        x: [B, N, H, D], D even.
        positions: [N] or [B, N] integers. The angles are computed in float64: in float32 the one
            of token 1,000,000 would be off by 0.06.
        base: of the wavelengths, 2 pi to 2 pi base.

    Returns:
        A tensor as x.

    Raises:
        ValueError: D is odd.
    """
    D = x.shape[-1]
    if D % 2 != 0:
        reject("x", f"{D} channels a head", "an even number, to turn them in pairs")
    exponents = torch.arange(0, D, 2, dtype=torch.float64, device=x.device) / D
    angles = positions.to(torch.float64)[..., None] * float(base) ** -exponents  # [(B,) N, D / 2]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (f(angles).to(wide)[..., None, :] for f in (torch.cos, torch.sin))  # [..., 1, D/2]
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def require_rope(rope: float | None, key_dim: int) -> None:
    """Raise unless rope is None, or a base > 1 for heads of an even number of channels."""
    if rope is None:
        return
    require_number("rope", rope)
    if rope <= 1:
        reject("rope", rope, "a number > 1, or None for no positions")
    if key_dim % 2 != 0:
        reject("key_dim", key_dim, "an even number, to turn channels in pairs")


def positions_of(
    mask: Tensor | None, tokens: Tensor, before: Tensor | None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return how many tokens that are there precede each one of tokens [B, N, ...]: [N] or [B, N].

    Args:
        mask: [B, N] bool.
        tokens: of which the shape counts.
        before: [B], how many an earlier call saw.
        cu_seqlens: [S + 1], where positions start again. Where q . k alone counts they need not.
    """
    N = tokens.shape[1]
    if mask is None:
        own = torch.arange(N, device=tokens.device)
    else:
        own = (mask.long().cumsum(1) - 1).clamp(min=0)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, tokens, "x")
        bounds = cu_seqlens.to(tokens.device, torch.int64)
        place = torch.arange(N, device=tokens.device)
        first = bounds[torch.searchsorted(bounds[1:], place, right=True)]  # [N], of its sequence
        own = own - own[..., first]
    return own if before is None else before[:, None] + own


def tokens_seen(mask: Tensor | None, tokens: Tensor, before: Tensor | None) -> Tensor:
    """Return how many of tokens [B, N, ...] are there, on top of before: [B] int64."""
    if mask is None:
        new = torch.full(tokens.shape[:1], tokens.shape[1], dtype=torch.int64, device=tokens.device)
    else:
        new = mask.long().sum(1)
    return new if before is None else before + new
