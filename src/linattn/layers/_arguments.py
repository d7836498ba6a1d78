"""Checks that both layers make of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn._validation import (
    check_mask,
    reject,
    require_bool,
    require_number,
    require_positive_int,
    require_tensor,
)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless value is one of choices."""
    if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
        reject(name, repr(value), f"one of {choices}")


def require_dropout(dropout: object) -> None:
    """Raise unless dropout is a rate in [0, 1)."""
    require_number("dropout", dropout)
    if not 0 <= dropout < 1:  # type: ignore[operator]
        reject("dropout", dropout, "a rate in [0, 1)")


def per_head(name: str, value: int | None, dim: int, num_heads: int) -> int:
    """Return value, or dim / num_heads if it is None."""
    if value is not None:
        require_positive_int(name, value)
        return value
    if dim % num_heads != 0:
        reject("dim", dim, f"a multiple of num_heads = {num_heads}, or {name} given")
    return dim // num_heads


def require_heads(heads: dict[str, int]) -> int:
    """Return the largest number of heads; raise unless all divide it."""
    for name, value in heads.items():
        require_positive_int(name, value)
    H = max(heads.values())
    for name, value in heads.items():
        if H % value != 0:
            reject(name, value, f"a divisor of the largest number of heads, {H}")
    return H


def check_forward(
    x: Tensor, dim: int, causal: bool, cache: object, cache_type: type, return_cache: bool,
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    """Check what a layer's forward gets, before anything runs."""
    require_tensor("x", x)
    if x.dim() != 3 or x.shape[2] != dim:
        reject("x", f"shape {list(x.shape)}", f"[B, N, {dim}]")
    if not x.is_floating_point():
        reject("x", x.dtype, "a floating point dtype, that of the weights", kind=TypeError)
    require_bool("return_cache", return_cache)
    if cache is not None:
        _check_cache(cache, cache_type, x)
    if not causal and (cache is not None or return_cache):
        reject("cache", "a cache with causal=False", "causal=True to decode")
    if cu_seqlens is not None and (cache is not None or return_cache):
        reject("cache", "a cache with cu_seqlens", "one sequence a row to decode")


def _check_cache(cache: object, cache_type: type, x: Tensor) -> None:
    """Check what any cache has; the operators check states and windows."""
    if not isinstance(cache, cache_type) or not isinstance(cache, tuple):
        reject("cache", type(cache).__name__, f"a {cache_type.__name__} or None", kind=TypeError)
    for name, value in zip(cache._fields, cache, strict=True):  # type: ignore[attr-defined]
        require_tensor(f"cache.{name}", value)
        if name == "seen" and (value.dtype != torch.int64 or value.shape != x.shape[:1]):
            got = f"{value.dtype} of shape {list(value.shape)}"
            reject("cache.seen", got, f"torch.int64 of shape [{x.shape[0]}], tokens of each row")


def blank_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [B, N, dim] with 0 where mask [B, N] is False: padding reaches not even weights."""
    if mask is None:
        return x
    check_mask(mask, x)
    return x.masked_fill(~mask[:, :, None], 0)


def at_least_float32(logits: Tensor) -> Tensor:
    """Return the logits of a decay in float32, or float64: 16 bits would round it to 1."""
    return logits if logits.dtype == torch.float64 else logits.float()
