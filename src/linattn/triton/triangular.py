"""The triangular system of the delta rule inside a chunk, solved once: (I + Diag(beta) A)^-1.

Blocks of 16 by substitution, row after row and all blocks at once; then twice two neighbours make
one: with T the inverse of the blocks on the diagonal and N what lies between two, T - T N T. Sums
of powers of the matrix would be products only, but lose all digits where keys are alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.numerics import dot
from linattn.triton.tiles import (
    chunk_of,
    load_column,
    load_pairs,
    load_tile,
    store_pairs,
    store_tile,
)


@triton.jit
def blocks_kernel(system, inverse, H, C: tl.constexpr):
    """Write the inverses of I + the blocks of 16 x 16 on the diagonal, elsewhere nothing."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, b = tl.arange(0, 16), tl.arange(0, C // 16)
    # In place, [blocks, 16, 16]: cut out of a [C, C] matrix they would spill registers.
    places = (chunk * H + head) * C * C + (b * 16 * (C + 1))[:, None, None]
    places = places + i[None, :, None] * C + i[None, None, :]
    inner = tl.load(system + places)
    unit = (i[:, None] == i[None, :]).to(tl.float32)[None, :, :]
    T = tl.zeros([C // 16, 16, 16], tl.float32) + unit
    for r in range(1, 16):
        here = (i == r)[None, :, None]
        coefficients = tl.sum(tl.where(here, inner, 0.0), axis=1)  # row r, [blocks, 16]
        known = tl.where((i < r)[None, :, None], T, 0.0)
        product = tl.sum(coefficients[:, :, None] * known, axis=1)
        T = tl.where(here, unit - product[:, None, :], T)
    tl.store(inverse + places, T)


@triton.jit
def merge_kernel(system, inverse, H, C: tl.constexpr, PRECISION: tl.constexpr):
    """Turn the inverses of the blocks [chunks, H, C, C] into that of I + system."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    between = load_pairs(system, chunk, H, head, C, False)
    c = tl.arange(0, C)
    same = (c // 16)[:, None] == (c // 16)[None, :]
    T = tl.where(same, load_pairs(inverse, chunk, H, head, C, False), 0.0)
    for level in tl.static_range(2):
        half, both = c // (16 << level), c // (32 << level)
        joined = (both[:, None] == both[None, :]) & (half[:, None] != half[None, :])
        right = dot(tl.where(joined, between, 0.0), T, tl.float32, PRECISION)
        T -= dot(T, right, tl.float32, PRECISION)
    store_pairs(inverse, T, chunk, H, head, C)


@triton.jit
def apply_kernel(
    pairs, beta, x, mask, table, out, H, GROUP, D,
    C: tl.constexpr, BD: tl.constexpr, BETA: tl.constexpr, TRANSPOSED: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write pairs (Diag(beta) x) [B, N, H, D], or with pairs transposed: (chunk, head, tile)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    x_ = load_tile(x, row, t, head // GROUP, there, d, D)
    if BETA:
        x_ *= load_column(beta, row, t, head, there)[:, None]
    matrix = load_pairs(pairs, chunk, H, head, C, TRANSPOSED)
    store_tile(out, dot(matrix, x_, DTYPE, PRECISION), row, t, head, own, d, D)


@triton.jit
def written_kernel(
    right, coefficients, keys, total, added, initial, final, out, mask, table, first,
    H, D, DV, TOTAL_ROWS,
    C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    REVERSED: tl.constexpr, INITIAL: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry the state through a sequence, by columns: (sequence, head, tile of DV).

    Forward:  out = right - coefficients S,  S <- total S + keys^T out
    REVERSED: out = right + coefficients Z,  Z <- total Z + added - keys^T out, from the last chunk

    added [chunks, H, D, DV] receives the state that each chunk met. BD covers D.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, e = tl.arange(0, BD), tl.program_id(2) * BV + tl.arange(0, BV)
    places = d[:, None] * DV + e[None, :]
    inside = (d < D)[:, None] & (e < DV)[None, :]
    own_state = (sequence * H + head) * D * DV + places
    S = tl.zeros([BD, BV], tl.float32)
    if INITIAL:
        S = tl.load(initial + own_state, mask=inside, other=0)
    begin, end = tl.load(first + sequence), tl.load(first + sequence + 1)
    sign = 1.0 if REVERSED else -1.0
    for n in range(0, end - begin):
        chunk = (end - 1 - n if REVERSED else begin + n).to(tl.int64)
        row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
        met = added + (chunk * H + head) * D * DV + places
        coefficients_ = load_tile(coefficients, row, t, head, there, d, D)
        out_ = load_tile(right, row, t, head, there, e, DV)
        out_ += sign * dot(coefficients_, S, DTYPE, PRECISION)
        store_tile(out, out_, row, t, head, own, e, DV)
        keys_ = load_tile(keys, row, t, head, there, d, D)
        more = -sign * dot(tl.trans(keys_), out_, DTYPE, PRECISION)
        if REVERSED:
            more += tl.load(met, mask=inside, other=0)
            tl.debug_barrier()  # several warps may hold one small tile: all read before one writes
        tl.store(met, S, mask=inside)
        if DECAY:
            to_total = total + (chunk * H + head) * TOTAL_ROWS
            d_total = tl.where(TOTAL_ROWS == 1, 0, d)
            S *= tl.load(to_total + d_total, mask=d < D, other=0)[:, None]
        S += more
    tl.store(final + own_state, S, mask=inside)
