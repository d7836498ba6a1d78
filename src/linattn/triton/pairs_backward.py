"""The gradients of queries, keys and log-decays from what pairs.py makes of them.

Given are the gradients of the scores of (q, k) and of (k, k), and of q exp(L_i), k exp(L_i) and
k exp(L_C - L_j). A log-decay hears all that crosses it and nothing else: at each level the rows
from it to the end of its half, or the columns before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    d_scores, x_, y_, g_, g_next, S: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Return the gradients of x, y and g [C, BD] from the pairs of one level."""
    C: tl.constexpr = x_.shape[0]
    to_row, from_column = level_factors(g_, g_next, S)
    upper = is_upper(S, C)
    to_row = tl.where(upper, to_row, 0.0)
    from_column = tl.where(upper, 0.0, from_column)
    d_level = tl.where(same_block(2 * S, C), d_scores, 0.0)
    rows, columns = x_ * to_row, y_ * from_column
    d_rows = dot(d_level, columns, DTYPE, PRECISION)
    d_columns = dot(tl.trans(d_level), rows, DTYPE, PRECISION)
    i = tl.arange(0, C)
    heard = tl.where(tl.trans(upper), i[None, :] >= i[:, None], i[None, :] < i[:, None])
    heard = (heard & same_block(S, C)).to(tl.float32)  # [t, i or j]
    dg = dot(heard, d_rows * rows + d_columns * columns, tl.float32, PRECISION)
    return d_rows * to_row, d_columns * from_column, dg


@triton.jit
def pairs_backward_kernel(
    q, k, g, mask, table, scores, d_scores, keys, d_keys, d_read_q, d_read_k, d_write_k,
    S, Z, dq, dk, dg, scale, H, Q_GROUP, K_GROUP, D, DV,
    C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, dk [B, N, H, D] and dg; one program a (chunk, head, tile of D).

    DECAY: 0 none, 1 one a token: dg [B, N, H, tiles], to be summed; 2 one a channel:
    dg [B, N, H, D]. KEYS: there are scores of (k, k), and k exp(L_i). scores and d_scores are those
    of scale q and k.
    """
    chunk, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
    d, i = tile * BD + tl.arange(0, BD), tl.arange(0, C)
    q_ = load_tile(q, row, t, head // Q_GROUP, there, d, D)
    k_ = load_tile(k, row, t, head // K_GROUP, there, d, D)
    d_qk = load_pairs(d_scores, chunk, H, head, C, False) * scale
    d_kk = tl.zeros([C, C], tl.float32)
    if KEYS:
        d_kk = load_pairs(d_keys, chunk, H, head, C, False)
    read_q = load_tile(d_read_q, row, t, head, there, d, D)
    read_k = tl.zeros([C, BD], tl.float32)
    if KEYS:
        read_k = load_tile(d_read_k, row, t, head, there, d, D)
    write_k = load_tile(d_write_k, row, t, head, there, d, D)
    passed = tl.zeros([BD], tl.float32)  # of the state through the whole chunk
    if DECAY > 0:
        size = (chunk * H + head) * D * DV
        for start in range(0, DV, BV):
            e = start + tl.arange(0, BV)
            S_ = load_state(S + size, d, D, DV, e, DV, 1)
            passed += tl.sum(S_ * load_state(Z + size, d, D, DV, e, DV, 1), axis=1)
    earlier = i[:, None] < i[None, :]  # [a, b]: a < b
    if DECAY == 2:
        _, t_next, there_next, _ = chunk_of(table, chunk, mask, C, MASKED, 1)
        g_ = load_gates(g, row, t, head, there, d, D)
        g_next = load_gates(g, row, t_next, head, there_next, d, D)
        dq_, dk_ = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
        dg_ = tl.zeros([C, BD], tl.float32)
        for level in tl.static_range(6):
            x, y, z = _level(d_qk, q_, k_, g_, g_next, 1 << level, DTYPE, PRECISION)
            dq_, dk_, dg_ = dq_ + x, dk_ + y, dg_ + z
            if KEYS:
                x, y, z = _level(d_kk, k_, k_, g_, g_next, 1 << level, DTYPE, PRECISION)
                dk_, dg_ = dk_ + x + y, dg_ + z
        diagonal = tl.sum(tl.where(i[:, None] == i[None, :], d_qk, 0.0), axis=1)[:, None]
        dq_, dk_ = dq_ + diagonal * k_, dk_ + diagonal * q_
        g_next = tl.where((i + 1 < C)[:, None], g_next, 0.0)
        reads = tl.exp(tl.cumsum(g_, axis=0))
        writes = tl.exp(tl.cumsum(g_next, axis=0, reverse=True))
        crossed = reads * (q_ * read_q + k_ * read_k)
        at_or_after = tl.where(earlier, 1.0, 0.0) + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        dg_ += dot(at_or_after, crossed, tl.float32, PRECISION)
        before = tl.trans(earlier.to(tl.float32))
        dg_ += dot(before, writes * k_ * write_k, tl.float32, PRECISION)
        dg_ += (tl.exp(tl.sum(g_, axis=0)) * passed)[None, :]
        store_tile(dg, tl.where(there[:, None], dg_, 0.0), row, t, head, own, d, D)
    else:
        weight = tl.zeros([C, C], tl.float32) + 1.0
        reads, writes = tl.zeros([C], tl.float32) + 1.0, tl.zeros([C], tl.float32) + 1.0
        if DECAY == 1:
            g_ = load_column(g, row, t, head, there)
            L, last = cumulate(g_), total_of(g_)
            weight = fade(L[:, None] - L[None, :])
            reads, writes = fade(L), fade(last - L)
            # Sums over channels; the pairs are there whole, and counted once.
            crossed = reads * tl.sum(q_ * read_q + k_ * read_k, axis=1)
            dg_ = tl.sum(tl.where(earlier, 0.0, crossed[:, None]), axis=0)
            left = writes * tl.sum(k_ * write_k, axis=1)
            dg_ += tl.sum(tl.where(earlier, left[:, None], 0.0), axis=0)
            dg_ += tl.sum(passed, axis=0) * fade(last)
            if tile == 0:
                pairs = load_pairs(scores, chunk, H, head, C, False)
                pairs *= load_pairs(d_scores, chunk, H, head, C, False)
                if KEYS:
                    pairs += load_pairs(keys, chunk, H, head, C, False) * d_kk
                over = dot(pairs, earlier.to(tl.float32), tl.float32, PRECISION)  # j < t
                dg_ += tl.sum(tl.where(earlier, 0.0, over), axis=0)
            place = dg[0] + row * dg[1][0] + t * dg[1][1] + head * dg[1][2] + tile * dg[1][3]
            tl.store(place, tl.where(there, dg_, 0.0), mask=own)
        d_qk *= weight
        dq_ = dot(d_qk, k_, DTYPE, PRECISION)
        dk_ = dot(tl.trans(d_qk), q_, DTYPE, PRECISION)
        if KEYS:
            d_kk *= weight
            dk_ += dot(d_kk + tl.trans(d_kk), k_, DTYPE, PRECISION)
        reads, writes = reads[:, None], writes[:, None]
    dq_ += reads * read_q
    dk_ += reads * read_k + writes * write_k
    store_tile(dq, dq_, row, t, head, own, d, D)
    store_tile(dk, dk_, row, t, head, own, d, D)
