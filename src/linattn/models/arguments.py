"""Checks of what a model's `forward` is given, before anything runs."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from linattn._validation import is_readable, reject, require_tensor
from linattn.models.caching import tokens_seen
from linattn.models.configuration import LinattnConfig

# What transformers' collators, Trainer and `generate` pass to any model. The bounds of the keys of
# packed sequences are those of the queries, and nothing here needs the longest one.
EXTRAS = (
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch",
    "output_hidden_states", "output_attentions", "return_dict", "shift_labels",
)  # fmt: skip
INTEGERS = (torch.int64, torch.int32)


def check_extras(extras: dict[str, Any]) -> None:
    """Raise for an argument that no part of a model reads: a misspelt one would go unnoticed."""
    for name, value in extras.items():
        if name not in EXTRAS:
            reject(name, "an unknown argument", f"one of `forward`, or of {EXTRAS}", kind=TypeError)
        if name == "output_attentions" and value:
            reject(name, value, "False: a linear mixer has no map of weights to return")
    queries, keys = extras.get("cu_seq_lens_q"), extras.get("cu_seq_lens_k")
    if keys is not None:
        require_tensor("cu_seq_lens_k", keys)
        if queries is None:
            reject("cu_seq_lens_k", "it without cu_seq_lens_q", "both, alike, or neither")
        both = is_readable(queries) and is_readable(keys)
        if both and not torch.equal(queries.to(keys.device), keys.to(queries.dtype)):
            reject("cu_seq_lens_k", keys.tolist(), f"those of cu_seq_lens_q, {queries.tolist()}")


def check_tokens(name: str, tokens: Tensor) -> None:
    """Raise unless tokens are integers [B, N]."""
    require_tensor(name, tokens)
    if tokens.dtype not in INTEGERS:
        reject(name, tokens.dtype, "torch.int64 or torch.int32", kind=TypeError)
    if tokens.dim() != 2:
        reject(name, f"shape {list(tokens.shape)}", "[B, N]")


def reject_token(tokens: Tensor, vocab_size: int) -> NoReturn:
    """Raise for tokens that the embedding has refused."""
    got = f"tokens {int(tokens.min())} to {int(tokens.max())}"
    reject("input_ids", got, f"0 to vocab_size - 1 = {vocab_size - 1}")


def check_positions(positions: Tensor, x: Tensor) -> None:
    """Raise unless positions are integers [1, N] or [B, N] for x [B, N, dim]."""
    check_tokens("position_ids", positions)
    B, N = x.shape[:2]
    if positions.shape[0] not in (1, B) or positions.shape[1] != N:
        reject("position_ids", f"shape {list(positions.shape)}", f"[1, {N}] or [{B}, {N}]")


def check_labels(name: str, labels: Tensor, shape: torch.Size) -> None:
    """Raise unless labels are int64 of this shape."""
    require_tensor(name, labels)
    if labels.dtype != torch.int64:
        reject(name, labels.dtype, "torch.int64", kind=TypeError)
    if labels.shape != shape:
        reject(name, f"shape {list(labels.shape)}", f"{list(shape)}, one for every token")


def check_logits_to_keep(keep: object) -> None:
    """Raise unless keep is an int >= 0 or a tensor of indices."""
    if isinstance(keep, Tensor):
        if keep.dtype not in INTEGERS or keep.dim() != 1:
            got = f"{keep.dtype} of shape {list(keep.shape)}"
            reject("logits_to_keep", got, "an int, or integers of one dimension")
    elif isinstance(keep, bool) or not isinstance(keep, int | torch.SymInt):
        reject("logits_to_keep", repr(keep), "an int, or a tensor of indices", kind=TypeError)
    elif keep < 0:
        reject("logits_to_keep", keep, "an int >= 0; 0: all")


def check_cache(cache: object, config: LinattnConfig) -> None:
    """Raise unless cache is one of transformers for this model's layers."""
    made = "one made for this model: DynamicCache(config=model.config)"
    if not isinstance(cache, Cache):
        reject("cache", type(cache).__name__, made, kind=TypeError)
    kinds = config.layer_types or []
    if len(cache.layers) != len(kinds):
        reject("cache", f"{len(cache.layers)} layers", f"{len(kinds)}: {made}")
    for i, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        if hasattr(layer, "has_previous_state") != (kind == "linear_attention"):
            reject("cache", f"a {type(layer).__name__} for layer {i}, {kind}", made)
        if getattr(layer, "record_past", False) and kind == "linear_attention":
            expected = "one without: a recurrence does not go back (no assisted generation)"
            reject("cache", "one that records its past", expected)


def check_mask(mask: Any, cache: Cache | None, x: Tensor) -> None:
    """Raise for a mask [B, N] of another length, or of floats; others are transformers' own."""
    if mask is None or isinstance(mask, dict):
        return
    require_tensor("attention_mask", mask)
    if mask.dim() != 2:
        return
    if mask.is_floating_point():
        expected = "bool or integers: 0 is padding, 1 a token"
        reject("attention_mask", mask.dtype, expected, kind=TypeError)
    B, N = x.shape[:2]
    seen = _seen(cache)
    right = mask.shape[1] == N if cache is None else mask.shape[1] >= N
    if seen is not None:
        right = mask.shape[1] in (N, seen + N)
    if mask.shape[0] != B or not right:
        expected = f"[{B}, {N}]"
        if cache is not None:
            expected += f" or [{B}, {'seen + N' if seen is None else seen + N}]"
        reject("attention_mask", f"shape {list(mask.shape)}", expected)


def _seen(cache: Cache | None) -> int | None:
    """Return how many tokens a cache has seen; None where that takes a look into a graph."""
    if cache is None or torch.compiler.is_compiling():
        return None
    if all(cache.is_linear):
        seen = tokens_seen(cache)
        return int(seen) if is_readable(seen) else None
    length = cache.get_seq_length()
    return int(length) if not isinstance(length, Tensor) or is_readable(length) else None
