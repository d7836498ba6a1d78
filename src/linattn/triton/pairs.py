"""The weights of the pairs of tokens inside a chunk, written out, for any decay.

    scores_ij = sum_d x_id y_jd exp(L_id - L_jd),  j <= i  (strict: j < i)

One decay a channel leaves no product of two matrices, unless a point m between j and i splits the
exponent into two that are both <= 0:

    exp(L_i - L_j) = exp(g_m + ... + g_i) exp(g_{j+1} + ... + g_{m-1})

So the pairs are taken by levels: for s = 1, 2, 4, ... C / 2 those in the same block of 2 s, i in
its upper and j in its lower half, about the middle. Six products cover a chunk of 64 exactly,
however strong the decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.numerics import cumulate, dot, fade, finite, total_of
from linattn.triton.tiles import chunk_of, load_column, load_tile, store_pairs, store_tile


@triton.jit
def load_gates(g, row, t, head, there, d, D):
    """Return log-decays [C, len(d)], finite; 0 where nothing is."""
    return finite(load_tile(g, row, t, head, there, d, D))


@triton.jit
def level_factors(g_, g_next, S: tl.constexpr):
    """Return the two factors [C, BD] of level S: of the tokens as rows i and as columns j."""
    C: tl.constexpr = g_.shape[0]
    BD: tl.constexpr = g_.shape[1]
    if S == 1:
        return tl.exp(g_), tl.zeros([C, BD], tl.float32) + 1.0
    i = tl.arange(0, C)
    inner = tl.where(((i + 1) % S != 0)[:, None], g_next, 0.0)
    to_row = tl.cumsum(tl.reshape(g_, [C // S, S, BD]), axis=1)
    from_column = tl.cumsum(tl.reshape(inner, [C // S, S, BD]), axis=1, reverse=True)
    return tl.exp(tl.reshape(to_row, [C, BD])), tl.exp(tl.reshape(from_column, [C, BD]))


@triton.jit
def same_block(S: tl.constexpr, C: tl.constexpr):
    """Return which pairs [C, C] are in the same block of S tokens."""
    i = tl.arange(0, C)
    return (i // S)[:, None] == (i // S)[None, :]


@triton.jit
def is_upper(S: tl.constexpr, C: tl.constexpr):
    """Return which tokens [C, 1] are in the upper half of their block of 2 S."""
    i = tl.arange(0, C)
    return ((i // S) % 2 == 1)[:, None]


@triton.jit
def factors_kernel(
    q, k, g, mask, table, read_q, read_k, write_k, total, H, Q_GROUP, K_GROUP, D, TOTAL_ROWS,
    C: tl.constexpr, BD: tl.constexpr, CHANNELS: tl.constexpr, READ_K: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write q exp(L_i), k exp(L_i), k exp(L_C - L_j) [B, N, H, D] and exp(L_C).

    One program a (chunk, head, tile of D); total [chunks, H, 1 or D]. CHANNELS: g has D channels.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    q_ = load_tile(q, row, t, head // Q_GROUP, there, d, D)
    k_ = load_tile(k, row, t, head // K_GROUP, there, d, D)
    to_total = total + (chunk * H + head) * TOTAL_ROWS
    if CHANNELS:
        _, t_next, there_next, _ = chunk_of(table, chunk, mask, C, MASKED, 1)
        g_ = load_gates(g, row, t, head, there, d, D)
        g_next = load_gates(g, row, t_next, head, there_next, d, D)
        g_next = tl.where((tl.arange(0, C) + 1 < C)[:, None], g_next, 0.0)
        reads = tl.exp(tl.cumsum(g_, axis=0))
        writes = tl.exp(tl.cumsum(g_next, axis=0, reverse=True))
        tl.store(to_total + d, tl.exp(tl.sum(g_, axis=0)), mask=d < D)
    else:
        g_ = load_column(g, row, t, head, there)
        L, last = cumulate(g_), total_of(g_)
        reads, writes = fade(L)[:, None], fade(last - L)[:, None]
        if tl.program_id(2) == 0:
            tl.store(to_total, fade(last))
    store_tile(read_q, q_ * reads, row, t, head, own, d, D)
    if READ_K:
        store_tile(read_k, k_ * reads, row, t, head, own, d, D)
    store_tile(write_k, k_ * writes, row, t, head, own, d, D)


@triton.jit
def scores_kernel(
    x, y, g, beta, mask, table, scores, system, scale, H, X_GROUP, Y_GROUP, D,
    C: tl.constexpr, BD: tl.constexpr, DECAY: tl.constexpr, STRICT: tl.constexpr,
    BETA: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write scores [chunks, H, C, C] in float32, times scale; one program a chunk and head.

    DECAY: 0 none, 1 one a token, 2 one a channel. STRICT: without the diagonal. BETA: also write
    Diag(beta) scores to system.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, t, there, _ = chunk_of(table, chunk, mask, C, MASKED)
    i = tl.arange(0, C)
    found = tl.zeros([C, C], tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        x_ = load_tile(x, row, t, head // X_GROUP, there, d, D)
        y_ = load_tile(y, row, t, head // Y_GROUP, there, d, D)
        if DECAY < 2:
            found += dot(x_, tl.trans(y_), DTYPE, PRECISION)
        else:
            _, t_next, there_next, _ = chunk_of(table, chunk, mask, C, MASKED, 1)
            g_ = load_gates(g, row, t, head, there, d, D)
            g_next = load_gates(g, row, t_next, head, there_next, d, D)
            for level in tl.static_range(6):
                to_row, from_column = level_factors(g_, g_next, 1 << level)
                upper = is_upper(1 << level, C)
                rows = tl.where(upper, x_ * to_row, 0.0)
                columns = tl.where(upper, 0.0, y_ * from_column)
                pairs = dot(rows, tl.trans(columns), DTYPE, PRECISION)
                found += tl.where(same_block(2 << level, C), pairs, 0.0)
            if not STRICT:
                found += tl.where(i[:, None] == i[None, :], tl.sum(x_ * y_, axis=1)[:, None], 0.0)
    if DECAY == 1:
        L = cumulate(load_column(g, row, t, head, there))
        found *= fade(L[:, None] - L[None, :])
    seen = (i[:, None] > i[None, :]) if STRICT else (i[:, None] >= i[None, :])
    found = tl.where(seen, found * scale, 0.0)
    store_pairs(scores, found, chunk, H, head, C)
    if BETA:
        beta_ = load_column(beta, row, t, head, there)
        store_pairs(system, found * beta_[:, None], chunk, H, head, C)
