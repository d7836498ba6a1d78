"""What a layer hands back for decoding. Plain tuples of tensors, never changed by a layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RecurrentCache(NamedTuple):
    """The state of a recurrent layer: constant in the number of tokens seen."""

    state: Tensor  # [B, H, Dk, Dv], or one more of each for the affine kernel

    def select(self, rows: Tensor) -> RecurrentCache:
        """Return the cache of these batch rows [B'], in this order: what beam search needs."""
        return RecurrentCache(self.state.index_select(0, rows))


class ConvolutionCache(NamedTuple):
    """The state of a recurrent layer with a short convolution in front."""

    state: Tensor  # [B, H, Dk, Dv]
    convolution: Tensor  # [B, W - 1, C]: the last inputs of the convolution

    def select(self, rows: Tensor) -> ConvolutionCache:
        """Return the cache of these batch rows [B'], in this order: what beam search needs."""
        return ConvolutionCache(*(x.index_select(0, rows) for x in self))


class WindowCache(NamedTuple):
    """The state of a layer that is a short convolution alone."""

    convolution: Tensor  # [B, W - 1, C]

    def select(self, rows: Tensor) -> WindowCache:
        """Return the cache of these batch rows [B'], in this order: what beam search needs."""
        return WindowCache(self.convolution.index_select(0, rows))


class RetentionCache(NamedTuple):
    """The state of a layer whose keys are turned by their position."""

    state: Tensor  # [B, H, Dk, Dv]
    seen: Tensor  # [B] int64: how many tokens

    def select(self, rows: Tensor) -> RetentionCache:
        """Return the cache of these batch rows [B'], in this order: what beam search needs."""
        return RetentionCache(*(x.index_select(0, rows) for x in self))


class KeyValueCache(NamedTuple):
    """All keys and values seen, or those of the window: grows with every token, or up to it."""

    key: Tensor  # [B, N, Hk, D]
    value: Tensor  # [B, N, Hk, Dv]
    mask: Tensor  # [B, N] bool, False: not there
    seen: Tensor  # [B] int64: how many tokens

    def select(self, rows: Tensor) -> KeyValueCache:
        """Return the cache of these batch rows [B'], in this order: what beam search needs."""
        return KeyValueCache(*(x.index_select(0, rows) for x in self))
