"""The short causal convolution of a layer: its weights around `linattn.causal_conv1d`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn.convolution import MOST_TAPS, causal_conv1d


class ShortConvolution(nn.Module):
    """Depthwise causal convolution of [B, N, C], and SiLU unless told otherwise.

        y_t = silu(bias + sum_w weight_w x_{t-w})

    Args:
        channels: C.
        kernel_size: W, 1 to 8 taps; the last meets the token itself, as in torch.nn.Conv1d.
        bias: whether there is one.
        activation: "silu" or None.
        backend: as in `causal_conv1d`.

    Parameters: C W, and C with a bias. Initialised as torch.nn.Conv1d: uniform in +-1 / sqrt(W).
    """

    def __init__(
        self, channels: int, kernel_size: int, *, bias: bool = False,
        activation: Literal["silu"] | None = "silu", backend: str = "auto",
    ):  # fmt: skip
        super().__init__()
        check.require_positive_int("channels", channels)
        check.require_positive_int("kernel_size", kernel_size)
        if kernel_size > MOST_TAPS:
            check.reject("kernel_size", kernel_size, f"at most {MOST_TAPS}")
        self.channels, self.kernel_size, self.backend = channels, kernel_size, backend
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as torch.nn.Conv1d does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.kernel_size**-0.5), self.kernel_size**-0.5)

    def forward(
        self, x: Tensor, mask: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return y [B, N, C] and the state [B, W - 1, C] after the last token that is there."""
        y, after = causal_conv1d(
            x, self.weight, self.bias, activation=self.activation, mask=mask, initial_state=state,
            return_state=True, cu_seqlens=cu_seqlens, backend=self.backend,
        )  # fmt: skip
        return y, after if mask is None or cu_seqlens is not None else self._window(x, mask, state)

    def _window(self, x: Tensor, mask: Tensor, state: Tensor | None) -> Tensor:
        """Return the inputs up to the last token that is there: padding on the right is none."""
        rows, N = mask.shape
        if state is None:
            state = x.new_zeros(rows, self.kernel_size - 1, self.channels)
        inputs = torch.cat([state, x.masked_fill(~mask[:, :, None], 0)], dim=1)
        tokens = torch.arange(1, N + 1, device=x.device)
        last = torch.where(mask, tokens, 0).amax(1) if N > 0 else mask.new_zeros(rows).long()
        window = last[:, None] + torch.arange(self.kernel_size - 1, device=x.device)  # [B, W - 1]
        return inputs.gather(1, window[:, :, None].expand(-1, -1, self.channels))

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps."""
        return (self.kernel_size - 1) * self.channels

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.channels}, kernel_size={self.kernel_size}"
