"""The states before all chunks: what each chunk adds, then the recurrence from chunk to chunk.

    added_c = (x exp(...))^T y              over the tokens of chunk c; all chunks at once
    S_c     = total_{c-1} S_{c-1} + added_{c-1}

With x = k, y = v, and what is left of each key at the end of its chunk, these are the states before
the chunks. With x = scale q, y the gradient of o, what query i sees of the state before, and the
scan from the last chunk to the first, they are the gradients of the states after the chunks.

The affine state has one more row and column; x_one and y_one [B, N, H] are the coordinates that
belong to them (1 and 1 for keys and values).
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.numerics import cumulate, dot, fade, total_of
from linattn.triton.tiles import chunk_of, load_column, load_tile


@triton.jit
def added_kernel(
    x, x_one, y, y_one, g, mask, table, out, total, scale,
    H, X_GROUP, Y_GROUP, DX, DY, TILES_Y,
    C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr, AFFINE: tl.constexpr,
    DECAY: tl.constexpr, FROM_START: tl.constexpr, MASKED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write added_c, a tile for each program: (chunk, head x tiles of DX x tiles of DY).

    FROM_START: x_i exp(L_i), what is read of the state before; else x_j exp(L_C - L_j). Also
    writes total_c = exp(L_C), [chunks, H].
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    tile_x, tile_y = tl.program_id(2) // TILES_Y, tl.program_id(2) % TILES_Y
    row, t, there, _ = chunk_of(table, chunk, mask, C, MASKED)
    dx, dy = tile_x * BX + tl.arange(0, BX), tile_y * BY + tl.arange(0, BY)
    x_ = load_tile(x, row, t, head // X_GROUP, there, dx, DX) * scale
    y_ = load_tile(y, row, t, head // Y_GROUP, there, dy, DY)
    ones = there.to(tl.float32)
    factor = ones
    if DECAY:
        g_ = load_column(g, row, t, head, there)
        L, last = cumulate(g_), total_of(g_)
        factor = fade(L) if FROM_START else fade(last - L)
        if (tile_x == 0) & (tile_y == 0):
            tl.store(total + chunk * H + head, fade(last))
    x_ = x_ * factor[:, None]
    columns = DY + AFFINE
    to = out + (chunk * H + head) * (DX + AFFINE) * columns
    added = dot(tl.trans(x_), y_, DTYPE, PRECISION)
    inside = (dx < DX)[:, None] & (dy < DY)[None, :]
    tl.store(to + dx[:, None] * columns + dy[None, :], added, mask=inside)
    if AFFINE:
        u = load_column(x_one, row, t, head, there) * factor
        w = load_column(y_one, row, t, head, there)
        if tile_y == 0:
            tl.store(to + dx * columns + DY, tl.sum(x_ * w[:, None], axis=0), mask=dx < DX)
        if tile_x == 0:
            tl.store(to + DX * columns + dy, tl.sum(y_ * u[:, None], axis=0), mask=dy < DY)
            if tile_y == 0:
                tl.store(to + DX * columns + DY, tl.sum(u * w, axis=0))


@triton.jit
def scan_kernel(
    added, total, initial, final, first, H, SIZE, COLUMNS, TOTAL_ROWS,
    BLOCK: tl.constexpr, DECAY: tl.constexpr, REVERSED: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Put the state before each chunk in the place of what it adds; one program for some numbers.

    REVERSED: from the last chunk to the first. added [chunks, H, SIZE], total
    [chunks, H, TOTAL_ROWS] for 1 or Dk rows, initial and final [sequences, H, SIZE], first
    [sequences + 1] the sequences' first chunks.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    own = (sequence * H + head) * SIZE + i
    S = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        S = tl.load(initial + own, mask=inside, other=0)
    begin, end = tl.load(first + sequence), tl.load(first + sequence + 1)
    for n in range(0, end - begin):
        chunk = end - 1 - n if REVERSED else begin + n
        here = chunk * H + head
        more = tl.load(added + here * SIZE + i, mask=inside, other=0)
        tl.store(added + here * SIZE + i, S, mask=inside)
        if DECAY:
            total_row = tl.where(TOTAL_ROWS == 1, 0, i // COLUMNS)
            S = S * tl.load(total + here * TOTAL_ROWS + total_row, mask=inside, other=0)
        S = S + more
    tl.store(final + own, S, mask=inside)
