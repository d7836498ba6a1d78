"""How sharply a map attends: entropy and spectral gap (Nahshan et al. 2024, *LLN attention*).

The rows of a signed map are made shares by leaving out what is negative: its part of all weight,
`clipped`, is reported with the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linattn._validation import reject, require_number, require_positive_int
from linattn.evaluate.attention_map import AttentionMap, blocks

DENSE = 512  # tokens up to which a matrix's values are found whole


@dataclass(frozen=True)
class Concentration:
    """Of every head; lists of H numbers. NaN where nothing is left of the rows.

    Attributes:
        entropy: mean over rows of -sum_j P_ij log P_ij.
        relative_entropy: mean of the entropy over its largest, log of the tokens seen; of a causal
            map without its first row. 1: even, 0: one token.
        clipped: negative weight over all weight, sums of absolute values.
        row_sum, row_sum_deviation: of the raw weights, over the rows.
        second_eigenvalue: the largest absolute eigenvalue but the first, which is 1.
        spectral_gap: 1 less that.
        singular_value: the largest of P less its mean row: 0 where all rows are alike.
        empty_rows: share of rows without positive weight; they are left out of all means.
    """

    entropy: list[float]
    relative_entropy: list[float]
    clipped: list[float]
    row_sum: list[float]
    row_sum_deviation: list[float]
    second_eigenvalue: list[float]
    spectral_gap: list[float]
    singular_value: list[float]
    empty_rows: list[float]


@torch.inference_mode()
def concentration(
    attention: AttentionMap, *, base: float = math.e, block: int = 256
) -> Concentration:
    """Return the concentration of a map, from blocks of its columns.

    Work space is H N `block` numbers, never N x N (beyond 512 tokens). The eigenvalues of a causal
    map are its diagonal; otherwise, and for the singular value, each step of an iterative method
    goes once over the map.

    Args:
        attention: of `record`.
        base: of the logarithm of the entropy.
        block: columns at a time.

    Raises:
        ValueError: base <= 0 or 1, block < 1, a single token.
    """
    require_number("base", base)
    if base <= 0 or base == 1:
        reject("base", base, "a number > 0 other than 1")
    require_positive_int("block", block)
    if attention.tokens < 2:
        reject("attention", f"{attention.tokens} tokens", "at least two")
    H, N = attention.heads, attention.tokens
    positive, negative, logs = (torch.zeros(H, N, dtype=torch.double) for _ in range(3))
    diagonal = torch.zeros(H, N, dtype=torch.double)
    for first, part in blocks(attention, block):
        P = part.double()
        above = P.clamp(min=0)
        positive += above.sum(-1)
        negative += (P - above).sum(-1)
        logs += torch.special.xlogy(above, above).sum(-1)
        last = first + P.shape[-1]
        diagonal[:, first:last] = above[:, first:last].diagonal(dim1=1, dim2=2)
    there = positive > 0  # [H, N]
    entropy = (positive.log() - logs / positive) / math.log(base)
    seen = torch.arange(1, N + 1) if attention.causal else torch.full((N,), N)
    relative = entropy / (seen.double().log() / math.log(base))  # first row: 0 / 0
    counted = there & (seen > 1)
    rows = positive + negative
    values = [_Shares(attention, head, positive[head], block) for head in range(H)]
    if attention.causal:
        own = torch.where(there, diagonal / positive, 0)
        second = own.sort(1).values[:, -2].tolist()  # the first is 1, of the first row that is left
    else:
        second = [v.second_eigenvalue() for v in values]
    return Concentration(
        _mean(entropy, there), _mean(relative, counted),
        (-negative.sum(1) / (positive - negative).sum(1)).abs().tolist(),
        rows.mean(1).tolist(), rows.std(1).tolist(),
        second, [1 - x for x in second], [v.singular_value() for v in values],
        (~there).double().mean(1).tolist(),
    )  # fmt: skip


def _mean(x: Tensor, where: Tensor) -> list[float]:
    return (torch.where(where, x, 0).sum(1) / where.sum(1)).tolist()


class _Shares:
    """A head's map as shares P, and its mean row m, as far as products with them go."""

    def __init__(self, attention: AttentionMap, head: int, total: Tensor, block: int):
        self.attention, self.head, self.block = attention, head, block
        self.N = attention.tokens
        self.scale = torch.where(total > 0, 1 / total, 0)  # [N]
        self.mean = torch.cat([part.mean(0) for _, part in self._parts()])  # [N]

    def _parts(self) -> list[tuple[int, Tensor]]:
        """Yield (first, P[:, first:last])."""
        found = getattr(self, "_kept", None)
        if found is not None:
            return found
        parts = (
            (first, part[self.head].double().clamp(min=0) * self.scale[:, None])
            for first, part in blocks(self.attention, self.block)
        )
        if self.N > DENSE:
            return parts  # type: ignore[return-value]
        self._kept = list(parts)
        return self._kept

    def _times(self, x: np.ndarray) -> np.ndarray:
        """Return (P - 1 m^T) x."""
        X = torch.as_tensor(x, dtype=torch.double).reshape(self.N, -1)
        y = sum(part @ X[i : i + part.shape[1]] for i, part in self._parts()) - self.mean @ X
        return np.asarray(y).reshape(x.shape)

    def _transposed(self, x: np.ndarray) -> np.ndarray:
        """Return (P - 1 m^T)^T x."""
        X = torch.as_tensor(x, dtype=torch.double).reshape(self.N, -1)
        y = torch.cat([part.T @ X for _, part in self._parts()])
        return np.asarray(y - self.mean[:, None] * X.sum(0)).reshape(x.shape)

    def _operator(self) -> object:
        from scipy.sparse.linalg import LinearOperator  # type: ignore[import-untyped]

        return LinearOperator(
            (self.N, self.N), matvec=self._times, rmatvec=self._transposed, matmat=self._times,
            rmatmat=self._transposed, dtype=np.float64,
        )  # fmt: skip

    def singular_value(self) -> float:
        """Return the largest singular value of P - 1 m^T."""
        if self.N <= DENSE:
            return float(np.linalg.norm(self._times(np.eye(self.N)), 2))
        from scipy.sparse.linalg import svds

        start = np.random.default_rng(0).standard_normal(self.N)
        return float(
            svds(self._operator(), 1, return_singular_vectors=False, v0=start, tol=1e-4)[0]
        )

    def second_eigenvalue(self) -> float:
        """Return the largest |eigenvalue| of P - 1 m^T: of P without its first (Wielandt)."""
        if self.N <= DENSE:
            return float(np.abs(np.linalg.eigvals(self._times(np.eye(self.N)))).max())
        from scipy.sparse.linalg import eigs

        start = np.random.default_rng(0).standard_normal(self.N)
        found = eigs(self._operator(), 1, which="LM", return_eigenvectors=False, v0=start, tol=1e-4)
        return float(np.abs(found[0]))
