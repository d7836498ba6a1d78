"""Reading and writing tiles of strided tensors, with offsets of 64 bits.

A tensor is given to a kernel as (pointer, strides): `x[0]` and `x[1]`, the strides in the order of
its dimensions [B, N, H, D] or [B, N, H].
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.numerics import narrow


@triton.jit
def chunk_of(table, chunk, mask, C: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr = 0):
    """Return a chunk's batch row, tokens [C], which are its own and not masked, and its own.

    AHEAD: the tokens that many places later, where they are still of the sequence.
    """
    row = tl.load(table + 4 * chunk)
    t = tl.load(table + 4 * chunk + 1) + AHEAD + tl.arange(0, C).to(tl.int64)
    own = t < tl.load(table + 4 * chunk + 2)
    there = own
    if MASKED:
        kept = tl.load(mask[0] + row * mask[1][0] + t * mask[1][1], mask=own, other=0)
        there = own & (kept != 0)
    return row, t, there, own


@triton.jit
def load_column(x, row, t, head, there):
    """Return the numbers [C] of a [B, N, H] tensor in float32; 0 where no token is."""
    place = x[0] + row * x[1][0] + head.to(tl.int64) * x[1][2]
    return tl.load(place + t * x[1][1], mask=there, other=0).to(tl.float32)


@triton.jit
def store_column(x, value, row, t, head, own):
    """Write the numbers [C] to a float32 [B, N, H] tensor."""
    place = x[0] + row * x[1][0] + head.to(tl.int64) * x[1][2]
    tl.store(place + t * x[1][1], value, mask=own)


@triton.jit
def load_tile(x, row, t, head, there, d, D):
    """Return a tile [C, len(d)] of a [B, N, H, D] tensor in float32; 0 where nothing is."""
    place = x[0] + row * x[1][0] + head.to(tl.int64) * x[1][2]
    places = place + t[:, None] * x[1][1] + d[None, :].to(tl.int64) * x[1][3]
    return tl.load(places, mask=there[:, None] & (d < D)[None, :], other=0).to(tl.float32)


@triton.jit
def store_tile(x, value, row, t, head, own, d, D):
    """Write a float32 tile [C, len(d)], rounded to the tensor's dtype."""
    place = x[0] + row * x[1][0] + head.to(tl.int64) * x[1][2]
    places = place + t[:, None] * x[1][1] + d[None, :].to(tl.int64) * x[1][3]
    DTYPE: tl.constexpr = x[0].dtype.element_ty
    value = narrow(value, DTYPE).to(DTYPE)
    tl.store(places, value, mask=own[:, None] & (d < D)[None, :])


@triton.jit
def load_state(S, rows, ROWS, step_row, columns, COLUMNS, step_column):
    """Return a tile [rows, columns] of a state in float32; 0 outside of it."""
    places = S + rows[:, None] * step_row + columns[None, :] * step_column
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(places, mask=inside, other=0)


@triton.jit
def load_pairs(x, chunk, H, head, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return a matrix [C, C] of x [chunks, H, C, C], or its transpose."""
    i = tl.arange(0, C)
    rows, columns = (i[None, :], i[:, None]) if TRANSPOSED else (i[:, None], i[None, :])
    return tl.load(x + (chunk * H + head) * C * C + rows * C + columns)


@triton.jit
def store_pairs(x, value, chunk, H, head, C: tl.constexpr):
    """Write a matrix [C, C] of x [chunks, H, C, C]."""
    i = tl.arange(0, C)
    tl.store(x + (chunk * H + head) * C * C + i[:, None] * C + i[None, :], value)
