"""One decay a channel: g [m, C, Dk], where scores are no product of two matrices.

exp(L_id - L_jd) splits into a factor of i and one of j only about a reference point between them.
Rows are taken in blocks of 16. Keys of earlier blocks meet the block's queries about the block's
start: both exponents are <= 0, so any decay is safe. Inside a block the same reference leaves the
keys an exponent >= 0; up to LIMIT that is exact enough and two matrix products do it. A row by
which the block has decayed by more than LIMIT is computed pair by pair instead. That choice looks
only at tokens up to the row, so a later gate cannot change an earlier output by a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.chunked.decay import TokenDecay

BLOCK = 16
LIMIT = 30.0  # exp(30) leaves float32 26 decades; the rounding of its argument costs 2e-6
PAIRS_AT_ONCE = 256  # blocks of 16 x 16 x Dk written out together: 16 MiB of float32 at Dk = 64


class ChannelDecay(TokenDecay):
    """One decay a token, head and channel."""

    def __init__(self, g: Tensor):
        super().__init__(g)
        m, C, D = g.shape
        self.shape = (m, C // BLOCK, BLOCK, D)
        L = self.L.view(self.shape)
        ends = L[:, :-1, -1]  # [m, blocks - 1, D]
        self.start = torch.cat([torch.zeros_like(L[:, :1, 0]), ends], dim=1)  # [m, blocks, D]
        inside = L - self.start[:, :, None]  # [m, blocks, 16, D], <= 0
        self.row_factor = inside.to(g.dtype).exp()
        self.column_factor = (-inside).clamp_(max=LIMIT).to(g.dtype).exp()
        self.slow_rows = (inside < -LIMIT).any(-1)  # [m, blocks, 16]
        slow = self.slow_rows.any(-1).view(-1).nonzero().view(-1)
        self.slow_blocks = slow.split(PAIRS_AT_ONCE) if slow.numel() else ()

    def _column_factor(self, a: int) -> Tensor:
        """Exp of what keys before block a have decayed by its start: [m, 16 a, Dk]."""
        end = a * BLOCK
        return (self.start[:, a, None] - self.L[:, :end]).to(self.grad.dtype).exp_()

    def _pair_factor(self, blocks: Tensor) -> Tensor:
        """exp(L_i - L_j), j <= i, for some blocks: [blocks, 16, 16, Dk]."""
        L = self.L.view(-1, BLOCK, self.shape[3])[blocks]
        return (L[:, :, None] - L[:, None]).clamp_(max=0).to(self.grad.dtype).exp_()

    def scores(self, x: Tensor, y: Tensor, diagonal: int = 0) -> Tensor:
        m, A, _, D = self.shape
        rows = x.view(self.shape) * self.row_factor
        columns = (y.view(self.shape) * self.column_factor).view(-1, BLOCK, D)
        inner = torch.bmm(rows.view(-1, BLOCK, D), columns.mT)  # [m blocks, 16, 16]
        if self.slow_blocks:
            slow_rows = self.slow_rows.view(-1, BLOCK, 1)
            x_, y_ = x.view(-1, BLOCK, D), y.view(-1, BLOCK, D)
            for blocks in self.slow_blocks:
                pairs = self._pair_factor(blocks).mul_(x_[blocks][:, :, None])
                exact = pairs.mul_(y_[blocks][:, None]).sum(-1)
                inner[blocks] = torch.where(slow_rows[blocks], exact, inner[blocks])
        scores = x.new_zeros(m, A * BLOCK, A * BLOCK)
        inner = inner.tril_(diagonal).view(m, A, BLOCK, BLOCK)
        for a in range(A):
            here = slice(a * BLOCK, (a + 1) * BLOCK)
            scores[:, here, here] = inner[:, a]
            if a > 0:
                earlier = y[:, : a * BLOCK] * self._column_factor(a)
                scores[:, here, : a * BLOCK] = torch.bmm(rows[:, a], earlier.mT)
        return scores

    def scores_backward(self, grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        m, A, _, D = self.shape
        rows = x.view(self.shape) * self.row_factor
        dx = torch.empty_like(x).view(self.shape)
        dy = torch.empty_like(y)
        d_rows = torch.empty_like(rows)
        inner = grad.new_empty(m, A, BLOCK, BLOCK)
        for a in range(A):
            here = slice(a * BLOCK, (a + 1) * BLOCK)
            inner[:, a] = grad[:, here, here]
        # Inside the blocks: rows that are computed pair by pair leave the product.
        fast = inner.masked_fill(self.slow_rows[..., None], 0).view(-1, BLOCK, BLOCK)
        columns = (y.view(self.shape) * self.column_factor).view(-1, BLOCK, D)
        flat_rows = rows.view(-1, BLOCK, D)
        d_rows.view(-1, BLOCK, D).copy_(torch.bmm(fast, columns))
        d_columns = torch.bmm(fast.mT, flat_rows)
        dx.copy_(d_rows * self.row_factor)
        dy.view(-1, BLOCK, D).copy_(d_columns * self.column_factor.view(-1, BLOCK, D))
        self._add_block_pairs(fast, flat_rows, columns)
        self._slow_backward(inner, x, y, dx, dy)
        for a in range(1, A):
            here, before = slice(a * BLOCK, (a + 1) * BLOCK), slice(0, a * BLOCK)
            factor = self._column_factor(a)
            earlier = y[:, before] * factor
            d_row = torch.bmm(grad[:, here, before], earlier)
            d_earlier = torch.bmm(grad[:, here, before].mT, rows[:, a])
            dx[:, a] += d_row * self.row_factor[:, a]
            dy[:, before] += d_earlier * factor
            # Every pair of this product crosses each t of block a up to its row, and each
            # earlier t that its key is before.
            triangle = self.at_or_after[:BLOCK, :BLOCK]
            self.grad[:, here] += torch.matmul(triangle, d_row.mul_(rows[:, a]))
            crossed = d_earlier.mul_(earlier)
            self.grad[:, before] += torch.matmul(self.before[before, before], crossed)
        return dx.view_as(x), dy

    def _add_block_pairs(self, grad: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Gradient of g from pairs inside fast blocks, j < i: rows minus columns, summed.

        What does not cross t cancels between the two, to the rounding of what cancels. Each pair
        that cancels at t is part of the gradient at another t of the block, so the error is
        small beside the gradient as a whole.
        """
        strict = grad.tril(-1)
        by_row = torch.bmm(strict, columns).mul_(rows)
        by_column = torch.bmm(strict.mT, rows).mul_(columns)
        triangle = self.at_or_after[:BLOCK, :BLOCK]
        self.grad.view(-1, BLOCK, self.shape[3]).add_(
            torch.matmul(triangle, by_row.sub_(by_column))
        )

    def _slow_backward(self, inner: Tensor, x: Tensor, y: Tensor, dx: Tensor, dy: Tensor) -> None:
        D = self.shape[3]
        inner = inner.view(-1, BLOCK, BLOCK)
        slow_rows = self.slow_rows.view(-1, BLOCK, 1)
        x_, y_, dx_, dy_ = (z.view(-1, BLOCK, D) for z in (x, y, dx, dy))
        g_ = self.grad.view(-1, BLOCK, D)
        for blocks in self.slow_blocks:
            grad = inner[blocks].masked_fill(~slow_rows[blocks], 0)[..., None]
            pairs = self._pair_factor(blocks).mul_(grad)  # [blocks, 16, 16, Dk]
            from_row = pairs * y_[blocks][:, None]
            dx_[blocks] += from_row.sum(2)
            pairs.mul_(x_[blocks][:, :, None])
            dy_[blocks] += pairs.sum(1)
            pairs.mul_(y_[blocks][:, None])
            for t in range(1, BLOCK):
                g_[blocks, t] += pairs[:, t:, :t].sum((1, 2))
