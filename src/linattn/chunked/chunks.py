"""The chunks of a segment, and what they add to the state: used by every form of the recurrence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.chunked.decay import NoDecay, make_decay
from linattn.chunked.layout import Layout, Segment
from linattn.chunked.scan import scan_forward


@dataclass(frozen=True)
class Kernel:
    """The weight of key j for query i: q . k + bias, divided by its sum or not."""

    bias: float
    normalize: bool

    @property
    def affine(self) -> bool:
        """Whether the state has the row and column of the constant coordinate."""
        return self.bias != 0.0 or self.normalize


@dataclass
class Chunks:
    """What forward and backward both need of the chunks of a segment; all [m, C, ...]."""

    q: Tensor  # times scale
    k: Tensor
    v: Tensor
    one: Tensor | None  # [m, C, 1] the constant coordinate: 0 where there is no token; None: all 1
    decay: NoDecay
    read_q: Tensor
    write_k: Tensor

    @classmethod
    def load(
        cls, layout: Layout, segment: Segment, q: Tensor, k: Tensor, v: Tensor,
        log_decay: Tensor | None, scale: float,
    ) -> Chunks:  # fmt: skip
        """Bring one segment inside."""
        decay = make_decay(layout.load_log_decay(log_decay, segment), layout.C)
        q_ = layout.load(q, segment).mul_(scale)
        k_, v_ = layout.load(k, segment), layout.load(v, segment)
        return cls(q_, k_, v_, layout.present(segment), decay, decay.read(q_), decay.write(k_))

    def weights(self, bias: float) -> Tensor:
        """Return W [m, C, C], 0 above the diagonal."""
        weights = self.decay.scores(self.q, self.k)
        return weights if bias == 0.0 else weights.add_(self.constant_weights(), alpha=bias)

    def constant_weights(self) -> Tensor:
        """Return D times the constant coordinate of the keys: what the bias multiplies."""
        C = self.q.shape[1]
        D = self.decay.matrix
        D = torch.ones(1, C, C, dtype=self.q.dtype, device=self.q.device).tril() if D is None else D
        return D.expand(self.q.shape[0], C, C) if self.one is None else D * self.one.mT

    def read_one(self, bias: float) -> Tensor:
        """Return the constant coordinate of the queries as it reads the state: b exp(L)."""
        factor = self.decay.read_factor
        return self.q.new_full((1, 1, 1), bias) if factor is None else bias * factor

    def write_one(self) -> Tensor:
        """Return the constant coordinate of the keys as it stands after the chunk [m, C, 1]."""
        factor, one = self.decay.write_factor, self.one
        if factor is None:
            return torch.ones_like(self.q[..., :1]) if one is None else one
        return factor if one is None else factor * one

    def written(self, affine: bool) -> Tensor:
        """Return what the chunk adds to the state [m, Dk (+ 1), Dv (+ 1)]."""
        if not affine:
            return torch.bmm(self.write_k.mT, self.v)
        Dk, Dv = self.k.shape[2], self.v.shape[2]
        out = self.q.new_empty(self.q.shape[0], Dk + 1, Dv + 1)
        one = self.write_one()
        out[:, :Dk, :Dv] = torch.bmm(self.write_k.mT, self.v)
        out[:, Dk:, :Dv] = torch.bmm(one.mT, self.v)
        out[:, :Dk, Dv] = self.write_k.sum(1)
        out[:, Dk, Dv] = one.sum((1, 2))
        return out

    def states(
        self, segment: Segment, carry: Tensor | None, boundary: Tensor, affine: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the states before the chunks [m, ...] and the one after the segment."""
        written = self.written(affine).unflatten(0, (segment.chunks, -1))
        total, R = self.decay.total, written.shape[1]

        def update(c: int, S: Tensor) -> Tensor:
            if total is None:
                return S + written[c]
            return torch.addcmul(written[c], S, total[c * R : (c + 1) * R])

        states, carry = scan_forward(segment, carry, boundary, update)
        return states.flatten(0, 1), carry
