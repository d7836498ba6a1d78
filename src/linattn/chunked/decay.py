"""The decays inside a chunk: exact for any strength, and their gradient without cancellation.

With L_t = g_1 + ... + g_t inside the chunk, a decay does four things, each by an exp of something
<= 0, so that nothing overflows:

    read(q)_i    = q_i exp(L_i)            what query i reads of the state before the chunk
    write(k)_j   = k_j exp(L_C - L_j)      what is left of key j after the chunk
    total        = exp(L_C)                what is left of the state after the chunk
    scores(x,y)  = sum_d x_id y_jd exp(L_id - L_jd) for j <= i

L is summed in float64 and g clamped at -800 (exp(-800) is 0 even in float64), so differences are
exact after a hard reset of -inf too. The gradient of g_t is the sum over all that crosses from
before t to t or later, and is added up as such: nothing that does not cross t enters, so it is
right to rounding however small it is. Every array is [m, C, ...], m chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESET = -800.0


def make_decay(g: Tensor | None, C: int) -> NoDecay | TokenDecay:
    """Return the decay for g: None, [m, C, 1] or [m, C, Dk]."""
    from linattn.chunked.channel_decay import ChannelDecay  # its base class is here

    if g is None:
        return NoDecay()
    return TokenDecay(g) if g.shape[2] == 1 else ChannelDecay(g)


class NoDecay:
    """Nothing is forgotten."""

    total: Tensor | None = None
    read_factor: Tensor | None = None
    write_factor: Tensor | None = None
    matrix: Tensor | None = None

    def read(self, x: Tensor) -> Tensor:
        """Return x as it reads the state before the chunk."""
        return x

    def write(self, x: Tensor) -> Tensor:
        """Return x as it stands in the state after the chunk."""
        return x

    def scores(self, x: Tensor, y: Tensor, diagonal: int = 0) -> Tensor:
        """Return the decayed products [m, C, C], 0 where j > i + diagonal."""
        return torch.bmm(x, y.mT).tril_(diagonal)

    def scores_backward(self, grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and y; `grad` is 0 where the scores are."""
        return torch.bmm(grad, y), torch.bmm(grad.mT, x)

    def forget(self, S: Tensor, chunk: slice) -> Tensor:
        """Return the state S [R, Dk, Dv] as it is after the chunks `chunk` of m."""
        return S

    def add_read(self, product: Tensor) -> None:
        """Add to the gradient of g what reads: product_i = read(q)_i * its gradient."""

    def add_write(self, product: Tensor) -> None:
        """Add to the gradient of g what was written: product_j = write(k)_j * its gradient."""

    def add_pairs(self, product: Tensor) -> None:
        """Add to the gradient of g the pairs [m, C, C]: product_ij = weight_ij * its gradient."""

    def add_total(self, states: Tensor, gradients: Tensor) -> None:
        """Add to the gradient of g what passes: states before, gradients after the chunk."""


class TokenDecay(NoDecay):
    """One decay a token and head: g [m, C, 1]."""

    total: Tensor
    read_factor: Tensor
    write_factor: Tensor

    def __init__(self, g: Tensor):
        self.L = g.clamp(min=RESET).to(_summing_dtype(g)).cumsum(1)  # [m, C, 1 or Dk]
        self.read_factor = self.L.to(g.dtype).exp()
        self.write_factor = (self.L[:, -1:] - self.L).to(g.dtype).exp_()
        self.total = self.read_factor[:, -1, :, None]  # [m, 1 or Dk, 1]
        self.grad = torch.zeros_like(g)
        C = g.shape[1]
        # As matrices, because a product with ones is faster than torch.cumsum on a CPU.
        self.at_or_after = torch.ones(C, C, dtype=g.dtype, device=g.device).triu()  # [t, i]: i >= t
        self.before = torch.ones(C, C, dtype=g.dtype, device=g.device).tril(-1)  # [t, j]: j < t
        if g.shape[2] == 1:
            # [m, C, C]: exp(L_i - L_j); above the diagonal it may be inf until tril sets it to 0.
            self.matrix = (self.L - self.L.mT).to(g.dtype).exp_().tril_()

    def read(self, x: Tensor) -> Tensor:
        return x * self.read_factor

    def write(self, x: Tensor) -> Tensor:
        return x * self.write_factor

    def scores(self, x: Tensor, y: Tensor, diagonal: int = 0) -> Tensor:
        assert self.matrix is not None
        scores = torch.bmm(x, y.mT).mul_(self.matrix)
        return scores.tril_(diagonal) if diagonal else scores

    def scores_backward(self, grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        assert self.matrix is not None
        grad = grad * self.matrix
        self.add_pairs(torch.bmm(x, y.mT).mul_(grad))
        return torch.bmm(grad, y), torch.bmm(grad.mT, x)

    def forget(self, S: Tensor, chunk: slice) -> Tensor:
        return S * self.total[chunk]

    def add_read(self, product: Tensor) -> None:
        if self.grad.shape[2] == 1:
            product = product.sum(-1, keepdim=True)
        self.grad += torch.matmul(self.at_or_after, product)

    def add_write(self, product: Tensor) -> None:
        if self.grad.shape[2] == 1:
            product = product.sum(-1, keepdim=True)
        self.grad += torch.matmul(self.before, product)

    def add_pairs(self, product: Tensor) -> None:
        # [t, j]: all that reads at t or later; then j < t.
        self.grad += torch.matmul(self.at_or_after, product).tril_(-1).sum(-1, keepdim=True)

    def add_total(self, states: Tensor, gradients: Tensor) -> None:
        passed = (states * gradients).sum(-1) * self.total[..., 0]  # [m, Dk or Dk + 1]
        if self.grad.shape[2] == 1:
            passed = passed.sum(-1, keepdim=True)
        self.grad += passed[:, None, :]


def _summing_dtype(g: Tensor) -> torch.dtype:
    return g.dtype if g.device.type == "mps" else torch.float64  # mps has no float64
