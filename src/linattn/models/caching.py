"""Between the caches of the layers, plain tuples, and the cache of transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.layers import (
    ConvolutionCache,
    GatedConvolution,
    LinearAttention,
    MetaLA,
    RecurrentCache,
    Retention,
    RetentionCache,
    WindowCache,
)

COUNT = "cumulative_length_linear"  # transformers' name for how many tokens a layer has seen


def cache_type(mixer: nn.Module) -> type[NamedTuple]:
    """Return the class of the tuple that a mixer hands back."""
    if isinstance(mixer, Retention) or (
        isinstance(mixer, LinearAttention) and mixer.rope is not None
    ):
        return RetentionCache
    if isinstance(mixer, GatedConvolution):
        return WindowCache
    if isinstance(mixer, MetaLA) and mixer.convolution is None:
        return RecurrentCache
    return ConvolutionCache if hasattr(mixer, "convolution") else RecurrentCache


def read(cache: Any, index: int, mixer: nn.Module) -> Any:
    """Return what layer `index` of a transformers cache holds as the tuple of its mixer, or None.

    The state is in the slot of recurrent states; the second tensor, the window of a convolution
    or a count of tokens, in the slot of convolutions, laid out as the mixer has it.
    """
    slot = cache.layers[index]
    if not slot.has_previous_state[0]:
        return None
    kind = cache_type(mixer)
    tensors = (slot.recurrent_states[0], slot.conv_states[0])
    return kind(*tensors[: len(kind._fields)])


def is_counted(cache: Any) -> bool:
    """Return whether transformers itself can say how many tokens a cache has seen."""
    return not all(cache.is_linear) or hasattr(cache.layers[0], "get_seq_length")


def tokens_seen(cache: Any) -> Tensor:
    """Return how many tokens a cache of linear mixers alone has seen."""
    slot = cache.layers[0]
    none = torch.zeros((), dtype=torch.int64)
    return getattr(slot, COUNT, none) if slot.has_previous_state[0] else none


def count(cache: Any, N: int) -> None:
    """Add N tokens to what linear layers have seen; before they write, which says they are full.

    transformers counts, since 5.25, in its own update of a convolution; before, not at all.
    """
    for slot in cache.layers:
        if hasattr(slot, "has_previous_state"):
            seen = getattr(slot, COUNT, None) if slot.has_previous_state[0] else None
            new = torch.zeros((), dtype=torch.int64) if seen is None else seen
            setattr(slot, COUNT, _kept(seen, new + N))


def write(cache: Any, index: int, new: tuple[Tensor, ...]) -> None:
    """Keep what a mixer handed back in layer `index` of a transformers cache.

    transformers' own update of a convolution appends to it, and only that update says that there
    is a state: a layer without a convolution would lose its state after every call.
    """
    slot = cache.layers[index]
    slot.recurrent_states[0] = _kept(slot.recurrent_states[0], new[0])
    slot.is_recurrent_states_initialized[0] = True
    if len(new) > 1:
        slot.conv_states[0] = _kept(slot.conv_states[0], new[1])
        slot.is_conv_states_initialized[0] = True
    slot.device, slot.dtype = new[0].device, new[0].dtype
    slot.has_previous_state[0] = True


def _kept(old: Tensor | None, new: Tensor) -> Tensor:
    """Return the tensor to keep: a compiled graph wants the address it knows, autograd a new one.

    The latter costs nothing, so it is the rule where no graph is captured.
    """
    captured = torch.compiler.is_compiling() or new.is_cuda
    if old is None or not captured or torch.is_grad_enabled():
        return new
    return old.copy_(new)
