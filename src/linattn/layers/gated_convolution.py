"""Gated convolution: a short window of tokens, in front of a layer that remembers long."""

from __future__ import annotations

from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.layers._arguments import blank_padding, check_forward, require_choice
from linattn.layers.cache import WindowCache
from linattn.layers.short_convolution import ShortConvolution


class GatedConvolution(nn.Module):
    """Short causal convolution times a projection: no state but the last few tokens.

        y_t = (sum_w weight_w x_{t-w} + bias) * (x_t W + b) + x_t

    Source: Arora et al., *Zoology* (2023), BaseConv, and *Based* (2024), whose models have it as
    their first layer: what a recurrence without a convolution cannot do by itself is to look at
    the token next to one. The code's names, ours: conv convolution, projection projection.

    Parameters: dim (dim + 1) + dim (kernel_size + 1).

    Args:
        dim: channels of x.
        kernel_size: taps, 1 to 8.
        backend: as in `causal_conv1d`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    def __init__(self, dim: int, *, kernel_size: int = 3, backend: str = "auto"):
        super().__init__()
        check.require_positive_int("dim", dim)
        require_choice("backend", backend, ("auto", *NAMES))
        self.dim, self.backend = dim, backend
        self.convolution = ShortConvolution(
            dim, kernel_size, bias=True, activation=None, backend=backend
        )
        self.projection = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: WindowCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, WindowCache]:
        """Mix the tokens of x; arguments and result as in `LinearAttention.forward`."""
        check_forward(x, self.dim, True, cache, WindowCache, return_cache, cu_seqlens)
        x = blank_padding(x, mask)
        before = None if cache is None else cache.convolution
        y, window = self.convolution(x, mask, before, cu_seqlens)
        gate = self.projection(x)  # under autocast in 16 bits, and so is the result
        y = blank_padding(y.to(gate.dtype) * gate + x.to(gate.dtype), mask)
        return (y, WindowCache(window)) if return_cache else y

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        return self.convolution.state_size()
