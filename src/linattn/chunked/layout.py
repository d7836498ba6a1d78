"""How a call is cut into segments of chunks, and how tensors move between the two layouts.

Outside: [B, N, Hx, D], any strides, any dtype, packed or not. Inside: [m, C, D] in the dtype of
the sums, one matrix for each of the m = chunks * rows * H chunks of a segment, chunk index first.
Tokens that are not there (masked, or filling up the last chunk) are zeros inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from linattn._validation import sequence_bounds, state_dtype

CHUNK = 64  # 32, 64 and 128 could not be told apart on a busy machine: see docs/log.md.
# Numbers that one work-space tensor may hold: 1 MiB of float32, so that the dozen live at a time
# stay in a common last-level cache and a loop iteration is long beside its 50 calls of torch.
WORKSPACE = 2**18


def chunks_per_segment(H: int, Dk: int, Dv: int) -> int:
    """Return how many chunks are worked on together.

    At least Dk tokens, so that states saved once a segment are at most N * Dv numbers a head.
    """
    per_chunk = max(CHUNK * max(Dk, Dv), Dk * Dv)
    return max(WORKSPACE // (H * per_chunk), (Dk + CHUNK - 1) // CHUNK)


def count_saved_states(N: int, H: int, Dk: int, Dv: int) -> int:
    """Return how many states are enough to begin every segment that begins inside a sequence.

    Such a segment comes after a whole segment of that sequence alone, packed or not.
    """
    return N // (chunks_per_segment(H, Dk, Dv) * CHUNK)


def saved_shape(B: int, N: int, H: int, Dk: int, Dv: int, one: int) -> tuple[int, ...]:
    """Return the shape of the states that backward starts from, one a segment and batch row."""
    return count_saved_states(N, H, Dk, Dv), B, H, Dk + one, Dv + one


@dataclass(frozen=True)
class Segment:
    """Some consecutive chunks of some batch rows.

    `first[c]` is where chunk c finds its initial state, if a sequence starts there, as a slice of
    the leading dimension of the state tensors; `last[c]` where a sequence that ends leaves it.
    """

    saved_at: int | None  # where its first state is saved; None: it begins with a sequence
    rows: slice
    tokens: slice  # of N; unpacked only
    chunks: int
    index: Tensor | None  # [chunks * C] positions in the packed row; fillers point to 0
    present: Tensor | None  # [chunks, rows, 1, C, 1]; None: every token is there
    first: list[slice | None]
    last: list[slice | None]
    sequences: list[int]  # packed only: which sequence each chunk belongs to


class Layout:
    """The cut of one call, and the moves between outside and inside."""

    def __init__(
        self, q: Tensor, v: Tensor, H: int, mask: Tensor | None, cu_seqlens: Tensor | None
    ):
        self.B, self.N, _, self.Dk = q.shape
        self.H, self.Dv = H, v.shape[3]
        self.dtype, self.device = state_dtype(q.dtype), q.device
        self.mask = mask
        self.bounds = None if cu_seqlens is None else sequence_bounds(cu_seqlens, self.N)
        longest = self.N
        if self.bounds is not None:
            pairs = pairwise(self.bounds)
            longest = max(stop - start for start, stop in pairs)
        # Short sequences would mostly fill up a chunk of 64 with nothing.
        self.C = 16 if longest <= 16 else 32 if longest <= 32 else CHUNK
        self.per_segment = chunks_per_segment(H, self.Dk, self.Dv) * (CHUNK // self.C)

    def segments(self) -> Iterator[list[Segment]]:
        """Yield, for each block of batch rows, its segments from the first token to the last."""
        if self.N == 0 or self.B == 0:
            return
        if self.bounds is not None:
            yield self._packed_segments(self.bounds)
            return
        per_chunk = self.H * max(self.C * max(self.Dk, self.Dv), self.Dk * self.Dv)
        chunks = min(self.per_segment, -(-self.N // self.C))
        rows = max(1, WORKSPACE // (per_chunk * chunks))
        for row in range(0, self.B, rows):
            yield self._row_segments(slice(row, min(row + rows, self.B)))

    def _row_segments(self, rows: slice) -> list[Segment]:
        found: list[Segment] = []
        length = self.per_segment * self.C
        for start in range(0, self.N, length):
            stop = min(start + length, self.N)
            chunks = -(-(stop - start) // self.C)
            first: list[slice | None] = [None] * chunks
            last: list[slice | None] = [None] * chunks
            if start == 0:
                first[0] = rows
            if stop == self.N:
                last[-1] = rows
            present = self._present(rows, start, stop, chunks)
            found.append(
                Segment(
                    len(found) - 1 if found else None,
                    rows,
                    slice(start, stop),
                    chunks,
                    None,
                    present,
                    first,
                    last,
                    [],
                )
            )
        return found

    def _present(self, rows: slice, start: int, stop: int, chunks: int) -> Tensor | None:
        fill = chunks * self.C - (stop - start)
        if self.mask is None and fill == 0:
            return None
        b = rows.stop - rows.start
        if self.mask is None:
            there = torch.ones(b, stop - start, dtype=torch.bool, device=self.device)
        else:
            there = self.mask[rows, start:stop]
        there = torch.nn.functional.pad(there, (0, fill))  # [b, chunks * C]
        there = there.view(b, chunks, self.C).transpose(0, 1)  # [chunks, b, C]
        return there[:, :, None, :, None]

    def _packed_segments(self, bounds: list[int]) -> list[Segment]:
        starts: list[int] = []
        lengths: list[int] = []
        first: list[slice | None] = []
        last: list[slice | None] = []
        sequences: list[int] = []
        for s, (start, stop) in enumerate(pairwise(bounds)):
            for t in range(start, stop, self.C):
                starts.append(t)
                lengths.append(min(self.C, stop - t))
                sequences.append(s)
                first.append(slice(s, s + 1) if t == start else None)
                last.append(slice(s, s + 1) if t + self.C >= stop else None)
        offset = torch.arange(self.C)
        there = offset < torch.tensor(lengths)[:, None]  # [chunks, C]
        index = torch.where(there, torch.tensor(starts)[:, None] + offset, 0).to(self.device)
        there = there.to(self.device)
        if self.mask is not None:
            there = there & self.mask[0][index]
        found: list[Segment] = []
        saved = 0
        for cut in self._cuts(first):
            c = cut.start
            saved_at = saved if first[c] is None else None
            saved += saved_at is not None
            found.append(
                Segment(
                    saved_at, slice(0, 1), slice(0, 0), cut.stop - c, index[cut].reshape(-1),
                    there[cut][:, None, None, :, None], first[cut], last[cut],
                    sequences[cut],
                )
            )  # fmt: skip
        return found

    def _cuts(self, first: list[slice | None]) -> Iterator[slice]:
        """Yield the segments' chunks; a sequence that would be cut begins a segment of its own."""
        c = 0
        while c < len(first):
            stop = min(c + self.per_segment, len(first))
            if stop < len(first) and first[stop] is None:
                start = next((i for i in range(stop, c, -1) if first[i] is not None), c)
                stop = stop if start == c else start
            yield slice(c, stop)
            c = stop

    def load(self, x: Tensor, segment: Segment) -> Tensor:
        """Return x [B, N, Hx, D] inside the segment: [m, C, D], heads repeated, a fresh copy."""
        n, C, H, D = segment.chunks, self.C, self.H, x.shape[3]
        b, Hx = segment.rows.stop - segment.rows.start, x.shape[2]
        out = torch.empty(n, b, H, C, D, dtype=self.dtype, device=self.device)
        grouped = out.view(n, b, Hx, H // Hx, C, D)
        if segment.index is not None:
            packed = x[0].index_select(0, segment.index).view(n, 1, C, Hx, 1, D)
            grouped.copy_(packed.permute(0, 1, 3, 4, 2, 5))
        else:
            x = x[segment.rows, segment.tokens, :, None]  # [b, tokens, Hx, 1, D]
            whole = x.shape[1] // C
            if whole > 0:
                chunks = x[:, : whole * C].unflatten(1, (whole, C))  # [b, whole, C, Hx, 1, D]
                grouped[:whole].copy_(chunks.permute(1, 0, 3, 4, 2, 5))
            if whole < n:
                rest = x[:, whole * C :]  # [b, rest, Hx, 1, D]
                grouped[whole, ..., rest.shape[1] :, :] = 0
                grouped[whole, ..., : rest.shape[1], :].copy_(rest.permute(0, 2, 3, 1, 4))
        if segment.present is not None:
            out.masked_fill_(~segment.present, 0)
        return out.view(n * b * H, C, D)

    def load_log_decay(self, log_decay: Tensor | None, segment: Segment) -> Tensor | None:
        """Return log_decay inside: [m, C, 1], or [m, C, Dk] for one a channel."""
        if log_decay is None:
            return None
        if log_decay.dim() == 1:
            log_decay = log_decay.expand(self.B, self.N, self.H)
        if log_decay.dim() == 3:
            log_decay = log_decay[..., None]
        return self.load(log_decay, segment)

    def blank(self, x: Tensor, segment: Segment) -> Tensor:
        """Set x [m, C, D] to 0, in place, at tokens that are not there."""
        if segment.present is not None:
            b = segment.rows.stop - segment.rows.start
            inside = x.view(segment.chunks, b, self.H, self.C, x.shape[2])
            inside.masked_fill_(~segment.present, 0)
        return x

    def store(self, x: Tensor, out: Tensor, segment: Segment) -> None:
        """Write x [m, C, D] to out [B, N, Hx, D], summed over the heads that share one of Hx."""
        n, C, D, Hx = segment.chunks, self.C, x.shape[2], out.shape[2]
        b = segment.rows.stop - segment.rows.start
        x = self.blank(x, segment).view(n, b, Hx, self.H // Hx, C, D)
        x = x.sum(3) if Hx != self.H else x[:, :, :, 0]  # [n, b, Hx, C, D]
        if segment.index is not None:
            assert segment.present is not None
            kept = x[:, 0].transpose(1, 2).reshape(n * C, Hx, D)
            # Masked tokens keep the zeros that `output_like` starts from where there is a mask.
            there = segment.present.reshape(-1)
            out[0].index_copy_(0, segment.index[there], kept[there].to(out.dtype))
            return
        out = out[segment.rows, segment.tokens]  # [b, tokens, Hx, D]
        whole = out.shape[1] // C
        if whole > 0:
            chunks = out[:, : whole * C].unflatten(1, (whole, C))  # [b, whole, C, Hx, D]
            chunks.copy_(x[:whole].permute(1, 0, 3, 2, 4))
        if whole < n:
            rest = out[:, whole * C :]  # [b, rest, Hx, D]
            rest.copy_(x[whole, :, :, : rest.shape[1]].transpose(1, 2))

    def output_like(self, x: Tensor, heads: int, D: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor [B, N, heads, D] for `store` to fill."""
        shape = (self.B, self.N, heads, D)
        if self.bounds is not None and self.mask is not None:
            return torch.zeros(shape, dtype=dtype, device=x.device)
        return torch.empty(shape, dtype=dtype, device=x.device)

    def present(self, segment: Segment) -> Tensor | None:
        """Return [m, C, 1] with 1 where there is a token and 0 where not; None: all there."""
        if segment.present is None:
            return None
        n, b, _, C, _ = segment.present.shape
        there = segment.present.expand(n, b, self.H, C, 1)
        return there.reshape(n * b * self.H, C, 1).to(self.dtype)


def new_states(
    layout: Layout, initial_state: Tensor | None, cu_seqlens: Tensor | None, affine: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return a copy of the initial states, and zeros for the states to save."""
    sequences = layout.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    one = int(affine)
    if initial_state is not None:  # also the final state of a sequence without tokens
        boundary = initial_state.clone(memory_format=torch.contiguous_format)
    else:
        states = (sequences, layout.H, layout.Dk + one, layout.Dv + one)
        boundary = torch.zeros(states, dtype=layout.dtype, device=layout.device)
    shape = saved_shape(layout.B, layout.N, layout.H, layout.Dk, layout.Dv, one)
    return boundary, boundary.new_zeros(shape if save else 0)
