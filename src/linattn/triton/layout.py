"""What the host side of every kernel needs: chunks, strides, sizes of tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn._validation import sequence_bounds

CHUNK = 64
WIDE = 8  # warps of the kernels whose [64, 64] matrices do not fit the registers of 4
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def saved_shape(B: int, N: int, H: int, Dk: int, Dv: int, one: int) -> tuple[int, ...]:
    """Return the shape of what is saved for backward beside the inputs: nothing."""
    return (0,)


def strided(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor as kernels take it, with its strides."""
    return x, tuple(x.stride())


def block(D: int, dtype: torch.dtype) -> int:
    """Return the width of a tile of D channels: as few tiles as leave less than 32 idle."""
    most = 64 if dtype == torch.bfloat16 else 32  # 32 bits at 64 do not fit the registers
    width = max(16, triton.next_power_of_2(D)) if D <= 64 or D % 64 in (0, *range(33, 64)) else 32
    return min(most, width)


@functools.lru_cache(64)  # or every call would wait for a copy to the GPU
def _even_chunks(B: int, N: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the table of chunks and each sequence's first one, for B sequences of N tokens."""
    starts = torch.arange(0, N, CHUNK)
    rows = torch.arange(B).repeat_interleave(len(starts))
    table = torch.stack([rows, starts.repeat(B), torch.full_like(rows, N), rows], dim=1)
    return table.to(device), (torch.arange(B + 1) * len(starts)).to(device)


@dataclass
class Chunks:
    """The chunks of a call and its sizes."""

    B: int
    N: int
    H: int
    Dk: int
    Dv: int
    dtype: torch.dtype
    table: Tensor  # [chunks, 4] int64: batch row, first token, end of the sequence, its number
    first: Tensor  # [sequences + 1] int64: the first chunk of each
    mask: Tensor | None
    hip: bool
    causal: bool = True  # each chunk reads a state of its own
    size: int = CHUNK

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None,
        *, causal: bool = True,
    ) -> Chunks:  # fmt: skip
        """Cut the sequences of a call into chunks."""
        (B, N, _, Dk), Dv = q.shape, v.shape[3]
        H = max(q.shape[2], k.shape[2], v.shape[2])
        if cu_seqlens is None:
            table, first = _even_chunks(B, N, q.device)
        else:
            bounds = torch.tensor(sequence_bounds(cu_seqlens, N))
            counts = (bounds.diff() + CHUNK - 1) // CHUNK
            first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            of = torch.arange(len(counts)).repeat_interleave(counts)
            starts = bounds[of] + CHUNK * (torch.arange(len(of)) - first[of])
            table = torch.stack([torch.zeros_like(of), starts, bounds[of + 1], of], dim=1)
        device = q.device
        return cls(
            B, N, H, Dk, Dv, q.dtype, table.to(device), first.to(device), mask,
            torch.version.hip is not None, causal,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.table.shape[0]

    def common(self) -> dict[str, Any]:
        """Return the arguments that all kernels over chunks share."""
        # Without a mask the kernel does not look at it; it wants a pointer all the same.
        mask = self.table if self.mask is None else self.mask.view(torch.uint8)
        return {
            "mask": (mask, tuple(mask.stride())),
            "table": self.table,
            "H": self.H,
            "C": CHUNK,
            "MASKED": self.mask is not None,
            "DTYPE": _TYPES[self.dtype],
            "PRECISION": self.precision(),
        }

    def precision(self) -> str:
        """Return how float32 products are taken: to float32's own precision everywhere."""
        return "ieee" if self.hip else "tf32x3"

    def group(self, x: Tensor) -> int:
        """Return how many heads share one of x."""
        return self.H // x.shape[2]

    def column(self, value: Tensor | float) -> Tensor:
        """Return a coordinate [B, N, H] in float32, a number as a view of one element."""
        if isinstance(value, Tensor):
            return value
        return torch.full((), value, dtype=torch.float32, device=self.table.device).expand(
            self.B, self.N, self.H
        )

    def decay(self, g: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
        """Return a log-decay as kernels take it, [H] as [B, N, H]."""
        if g is None:
            return strided(self.column(0.0))
        return strided(g.expand(self.B, self.N, self.H) if g.dim() == 1 else g)

    def head_room(self, x: Tensor) -> Tensor:
        """Return room for one row of x a head, [B, N, H, D] in float32."""
        shape = (self.B, self.N, self.H, x.shape[3])
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def gradient_room(self, x: Tensor) -> Tensor:
        """Return the same for a gradient: in the dtype of x where no heads are to be summed."""
        dtype = torch.float32 if x.shape[2] != self.H else x.dtype
        return torch.empty(self.B, self.N, self.H, x.shape[3], dtype=dtype, device=x.device)


def gathered(dx: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x: the sum over the heads that share one of its."""
    if dx.shape[2] == x.shape[2]:
        return dx
    return dx.unflatten(2, (x.shape[2], -1)).sum(3).to(x.dtype)
