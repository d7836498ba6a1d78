"""The gradients of queries, keys and log-decays from what pairs.py makes of them.

Given are the gradients of the scores of (q, k) and of (k, k), and of q exp(L_i), k exp(L_i) and
k exp(L_C - L_j). A log-decay hears all that crosses it and nothing else: at each level the rows
from it to the end of its half, or the columns before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.log_decay import store_crossed
from linattn.triton.numerics import cumulate, dot, fade, total_of
from linattn.triton.pairs import is_upper, level_factors, load_gates, same_block
from linattn.triton.tiles import (
    chunk_of,
    load_column,
    load_pairs,
    load_state,
    load_tile,
    store_tile,
)


@triton.jit
def _level(
    d_scores, x_, y_, g_, g_next, S: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of x, y and g [C, BD] from the pairs of one level.

    d_scores points to a matrix [C, C], which is read anew for each level: it is not worth 32
    registers all the while.
    """
    C: tl.constexpr = x_.shape[0]
    to_row, from_column = level_factors(g_, g_next, S)
    upper = is_upper(S, C)
    to_row = tl.where(upper, to_row, 0.0)
    from_column = tl.where(upper, 0.0, from_column)
    i = tl.arange(0, C)
    places = i[:, None] * C + i[None, :]
    d_level = tl.load(d_scores + places, mask=same_block(2 * S, C), other=0)
    rows, columns = x_ * to_row, y_ * from_column
    d_rows = dot(d_level, columns, DTYPE, PRECISION)
    d_columns = dot(tl.trans(d_level), rows, DTYPE, PRECISION)
    # A row is heard by the decays of its half up to it, a column by those of its half behind it.
    from_rows, from_columns = d_rows * rows, d_columns * columns
    if S == 1:
        dg = from_rows
    else:
        split: tl.constexpr = [C // S, S, x_.shape[1]]
        up_to = tl.cumsum(tl.reshape(from_rows, split), axis=1, reverse=True)
        behind = tl.cumsum(tl.reshape(from_columns, split), axis=1)
        dg = tl.reshape(up_to, x_.shape) + tl.reshape(behind, x_.shape) - from_columns
    return d_rows * to_row, d_columns * from_column, dg


@triton.jit
def _passed(S, Z, d, D, DV, BV: tl.constexpr):
    """Return the sum over the columns of S and Z [D, DV] of their product, [len(d)]."""
    found = tl.zeros([d.shape[0]], tl.float32)
    for start in range(0, DV, BV):
        e = start + tl.arange(0, BV)
        S_ = load_state(S, d, D, DV, e, DV, 1)
        found += tl.sum(S_ * load_state(Z, d, D, DV, e, DV, 1), axis=1)
    return found


@triton.jit
def channel_backward_kernel(
    q, k, g, mask, table, d_scores, d_read, d_write, S, Z, dq, dk, dg,
    scale, H, Q_GROUP, K_GROUP, D, DV,
    C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dg [B, N, H, D] for one decay a channel; a (chunk, head, tile of D) each.

    d_scores, d_read, d_write are the gradients of the scores of scale q and k, of q exp(L_i) and
    of k exp(L_C - L_j). KEYS is a second pass for the scores of (k, k) and k exp(L_i): q is k then,
    and float32 dk and dg are added to. Both in one pass would spill three times as much.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
    d, i = tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, C)
    q_ = load_tile(q, row, t, head // Q_GROUP, there, d, D)
    k_ = load_tile(k, row, t, head // K_GROUP, there, d, D)
    _, t_next, there_next, _ = chunk_of(table, chunk, mask, C, MASKED, 1)
    g_ = load_gates(g, row, t, head, there, d, D)
    g_next = load_gates(g, row, t_next, head, there_next, d, D)
    d_scores += (chunk * H + head) * C * C
    dq_, dk_ = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
    dg_ = tl.zeros([C, BD], tl.float32)
    for level in tl.static_range(6):
        x, y, z = _level(d_scores, q_ * scale, k_, g_, g_next, 1 << level, DTYPE, PRECISION)
        dq_, dk_, dg_ = dq_ + x * scale, dk_ + y, dg_ + z
    # What is read of the state before is heard by all decays up to the reader.
    read = load_tile(d_read, row, t, head, there, d, D) * tl.exp(tl.cumsum(g_, axis=0))
    dq_ += read
    dg_ += tl.cumsum(q_ * read, axis=0, reverse=True)
    if KEYS:
        dk_ += dq_ + load_tile(dk, row, t, head, there, d, D)
        dg_ += load_tile(dg, row, t, head, there, d, D)
        tl.debug_barrier()  # several warps may hold one small tile: all read before one writes
    else:
        diagonal = tl.load(d_scores + i * (C + 1))[:, None] * scale
        dq_, dk_ = dq_ + diagonal * k_, dk_ + diagonal * q_
        store_tile(dq, dq_, row, t, head, own, d, D)
        # What is left to the state after is heard by all decays behind the writer.
        g_next = tl.where((i + 1 < C)[:, None], g_next, 0.0)
        write = load_tile(d_write, row, t, head, there, d, D)
        write *= tl.exp(tl.cumsum(g_next, axis=0, reverse=True))
        dk_ += write
        before = (i[:, None] > i[None, :]).to(tl.float32)
        dg_ += dot(before, k_ * write, tl.float32, PRECISION)
        size = (chunk * H + head) * D * DV
        passed = _passed(S + size, Z + size, d, D, DV, BV)
        dg_ += (tl.exp(tl.sum(g_, axis=0)) * passed)[None, :]
    store_tile(dg, tl.where(there[:, None], dg_, 0.0), row, t, head, own, d, D)
    store_tile(dk, dk_, row, t, head, own, d, D)


@triton.jit
def token_backward_kernel(
    q, k, g, mask, table, d_scores, d_keys, d_read_q, d_read_k, d_write_k, S, Z, dq, dk, dg,
    scale, H, Q_GROUP, K_GROUP, D, DV,
    C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dg for one decay a token (DECAY) or none; dg [B, N, H, tiles], to be summed.

    KEYS: there are scores of (k, k) and k exp(L_i) too. Without what the pairs inside the chunk
    give to dg: crossed_pairs_kernel.
    """
    chunk, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
    d, i = tile * BD + tl.arange(0, BD), tl.arange(0, C)
    q_ = load_tile(q, row, t, head // Q_GROUP, there, d, D)
    k_ = load_tile(k, row, t, head // K_GROUP, there, d, D)
    reads, writes = tl.zeros([C], tl.float32) + 1.0, tl.zeros([C], tl.float32) + 1.0
    d_qk = load_pairs(d_scores, chunk, H, head, C, False) * scale
    if DECAY:
        g_ = load_column(g, row, t, head, there)
        L, last = cumulate(g_), total_of(g_)
        d_qk *= fade(L[:, None] - L[None, :])
        reads, writes = fade(L), fade(last - L)
    dq_ = dot(d_qk, k_, DTYPE, PRECISION)
    dk_ = dot(tl.trans(d_qk), q_, DTYPE, PRECISION)
    if KEYS:
        d_kk = load_pairs(d_keys, chunk, H, head, C, False)
        if DECAY:
            d_kk *= fade(L[:, None] - L[None, :])
        dk_ += dot(d_kk + tl.trans(d_kk), k_, DTYPE, PRECISION)
    read_q = load_tile(d_read_q, row, t, head, there, d, D) * reads[:, None]
    write_k = load_tile(d_write_k, row, t, head, there, d, D) * writes[:, None]
    dq_ += read_q
    dk_ += write_k
    crossed = tl.sum(q_ * read_q, axis=1)
    left = tl.sum(k_ * write_k, axis=1)
    if KEYS:
        read_k = load_tile(d_read_k, row, t, head, there, d, D) * reads[:, None]
        dk_ += read_k
        crossed += tl.sum(k_ * read_k, axis=1)
    store_tile(dq, dq_, row, t, head, own, d, D)
    store_tile(dk, dk_, row, t, head, own, d, D)
    if DECAY:
        size = (chunk * H + head) * D * DV
        passed = tl.sum(_passed(S + size, Z + size, d, D, DV, BV), axis=0)
        earlier = i[:, None] < i[None, :]  # [a, b]: a < b
        dg_ = tl.sum(tl.where(earlier, 0.0, crossed[:, None]), axis=0)
        dg_ += tl.sum(tl.where(earlier, left[:, None], 0.0), axis=0)
        dg_ += passed * fade(last)
        place = (
            dg[0] + row * dg[1][0] + t * dg[1][1] + head.to(tl.int64) * dg[1][2] + tile * dg[1][3]
        )
        tl.store(place, tl.where(there, dg_, 0.0), mask=own)


@triton.jit
def crossed_pairs_kernel(
    mask, table, scores, d_scores, keys, d_keys, dg, H,
    C: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write what pairs with j < t <= i give to a decay of one number a token: dg [B, N, H]."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, t, _, own = chunk_of(table, chunk, mask, C, MASKED)
    pairs = load_pairs(scores, chunk, H, head, C, False)
    pairs *= load_pairs(d_scores, chunk, H, head, C, False)
    if KEYS:
        more = load_pairs(keys, chunk, H, head, C, False)
        pairs += more * load_pairs(d_keys, chunk, H, head, C, False)
    store_crossed(dg, pairs, table, chunk, mask, row, t, head, own, C, MASKED)
