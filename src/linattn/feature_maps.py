"""Feature maps phi, so that phi(q) . phi(k) weighs a key for a query. Each maps [..., D].

| name | phi(x) | size | source |
|---|---|---|---|
| identity | x | D | - |
| elu_plus_one | elu(x) + 1 | D | Katharopoulos et al. 2020 |
| relu | max(x, 0) | D | Kasai et al. 2021 (T2R) |
| squared_relu | max(x, 0) ** 2 | D | Hua et al. 2022 |
| normalised | x / norm(x) | D | Making Linear Attention Usable |
| taylor | [1, x / d^(1/4), x (x) x / sqrt(2 d)] | 1+D+D*D | Arora et al. 2024 (Based) |
| hedgehog | [softmax(W x), softmax(-W x)], learned | 2 D | Zhang et al. 2024 |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from linattn._validation import reject, require_positive_int


def identity(x: Tensor) -> Tensor:
    """Return x."""
    return x


def elu_plus_one(x: Tensor) -> Tensor:
    """Return elu(x) + 1 > 0."""
    return nn.functional.elu(x) + 1


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return torch.relu(x)


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0) squared."""
    return torch.relu(x).square()


def normalised(x: Tensor) -> Tensor:
    """Return x / norm(x), in x's dtype, whatever its size; sums in float32 at least, 0 stays 0."""
    if not x.is_floating_point():
        reject("x", x.dtype, "a floating-point dtype", kind=TypeError)
    if x.shape[-1] == 0:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    # The result does not depend on a common factor, so its gradient needs none of it either.
    largest = wide.detach().abs().amax(-1, keepdim=True)
    wide = wide / largest.masked_fill(largest == 0, 1)
    square = wide.square().sum(-1, keepdim=True)  # 1 to D, or 0
    return (wide * square.masked_fill(square == 0, 1).rsqrt()).to(x.dtype)


def taylor(x: Tensor) -> Tensor:
    """Return phi [..., 1 + D + D * D] with phi(q) . phi(k) = 1 + s + s^2 / 2, s = q . k / sqrt(D).

    The second-order Taylor series of exp(s), which is positive for every s. Use it with scale=1.
    """
    D = x.shape[-1]
    x = x * D**-0.25
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2) * 0.5**0.5  # [..., D * D]
    return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)


class Hedgehog(nn.Module):
    """Learned map [softmax(W x), softmax(-W x)], one W a head, the identity to begin with.

    x [B, N, num_heads, head_dim] -> [B, N, num_heads, 2 * head_dim], all positive.
    Zhang et al. 2024, The Hedgehog and the Porcupine.
    """

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        require_positive_int("num_heads", num_heads)
        require_positive_int("head_dim", head_dim)
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))  # [H, D, D]

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, N, num_heads, head_dim]."""
        if x.dim() != 4 or x.shape[2:] != self.weight.shape[:2]:
            expected = f"[B, N, {self.weight.shape[0]}, {self.weight.shape[1]}]"
            reject("x", f"shape {list(x.shape)}", expected)
        y = torch.einsum("bnhd,hed->bnhe", x, self.weight.to(x.dtype))
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": identity,
    "elu_plus_one": elu_plus_one,
    "relu": relu,
    "squared_relu": squared_relu,
    "normalised": normalised,
    "taylor": taylor,
}


def make_feature_map(
    name: str, num_heads: int, head_dim: int
) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the map of that name, and how many features it makes of head_dim channels.

    Raises:
        ValueError: no map has that name.
    """
    if not isinstance(name, str):
        reject("feature_map", repr(name), f"one of {[*FEATURE_MAPS, 'hedgehog']}", kind=TypeError)
    if name == "hedgehog":
        return Hedgehog(num_heads, head_dim), 2 * head_dim
    if name not in FEATURE_MAPS:
        reject("feature_map", repr(name), f"one of {[*FEATURE_MAPS, 'hedgehog']}")
    size = 1 + head_dim + head_dim * head_dim if name == "taylor" else head_dim
    return FEATURE_MAPS[name], size
