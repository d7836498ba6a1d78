"""The short causal convolution of a layer: its weights around `linattn.causal_conv1d`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn.convolution import MOST_TAPS, causal_conv1d


class ShortConvolution(nn.Module):
    """Depthwise causal convolution and SiLU of [B, N, C].

        y_t = silu(bias + sum_w weight_w x_{t-w})

    Args:
        channels: C.
        kernel_size: W, 1 to 8 taps; the last meets the token itself, as in torch.nn.Conv1d.
        bias: whether there is one.
        backend: as in `causal_conv1d`.

    Parameters: C W, and C with a bias. Initialised as torch.nn.Conv1d: uniform in +-1 / sqrt(W).
    """

    def __init__(
        self, channels: int, kernel_size: int, *, bias: bool = False, backend: str = "auto"
    ):
        super().__init__()
        check.require_positive_int("channels", channels)
        check.require_positive_int("kernel_size", kernel_size)
        if kernel_size > MOST_TAPS:
            check.reject("kernel_size", kernel_size, f"at most {MOST_TAPS}")
        self.channels, self.kernel_size, self.backend = channels, kernel_size, backend
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        nn.init.uniform_(self.weight, -(kernel_size**-0.5), kernel_size**-0.5)
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(kernel_size**-0.5), kernel_size**-0.5)

    def forward(
        self, x: Tensor, mask: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return y [B, N, C] and the state [B, W - 1, C] after the last token."""
        return causal_conv1d(
            x, self.weight, self.bias, activation="silu", mask=mask, initial_state=state,
            return_state=True, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps."""
        return (self.kernel_size - 1) * self.channels

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.channels}, kernel_size={self.kernel_size}"
