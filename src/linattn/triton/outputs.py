"""What every token reads: of the state before its chunk, and of the tokens of its chunk.

    o_i = out_scale [ (scale_q q_i S + u_i S_last) exp(L_i) + sum_j w_ij scale_v v_j ]
    w_ij = (scale_q scale_k q_i . k_j + u_i w_j) exp(L_i - L_j),  j <= i

u, w [B, N, H] are the last coordinates of queries and keys in the affine kernel (bias and 1). The
same kernel finds every gradient, because each is such a sum over other names (additive.py): for
those of k and v the sum is over i >= j, which is REVERSED.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.numerics import cumulate, dot, fade, total_of
from linattn.triton.tiles import (
    chunk_of,
    load_column,
    load_pairs,
    load_state,
    load_tile,
    store_column,
    store_tile,
)


@triton.jit
def outputs_kernel(
    q, u, k, w, v, v_one, g, pairs, mask, table, states, o, sums,
    scale_q, scale_k, scale_v, scale_o,
    H, Q_GROUP, K_GROUP, V_GROUP, D, DV, STATE_SIZE, STEP_ROW, STEP_COLUMN,
    C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, AFFINE: tl.constexpr,
    NORMALIZE: tl.constexpr, DECAY: tl.constexpr, REVERSED: tl.constexpr,
    BY_CHUNK: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of o for each program: (chunk, head, tile of DV).

    The state's element (row, column) is at row STEP_ROW + column STEP_COLUMN, so it can be read
    transposed. NORMALIZE divides by the sum of the weights and writes it to sums [B, N, H].

    BY_CHUNK: every chunk has a state, else every sequence. PAIRS: 0 what is read of the state is
    all; 1 the pairs in a chunk are weighed as above; 2 by `pairs` [chunks, H, C, C], REVERSED
    transposed, and the state's factor is in q.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
    dv = tl.program_id(2) * BV + tl.arange(0, BV)
    state = chunk if BY_CHUNK else tl.load(table + 4 * chunk + 3)
    S = states + (state * H + head) * STATE_SIZE
    scores = tl.zeros([C, C], tl.float32)
    out = tl.zeros([C, BV], tl.float32)
    sum_ = tl.zeros([C], tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        q_ = load_tile(q, row, t, head // Q_GROUP, there, d, D)
        if PAIRS == 1:
            k_ = load_tile(k, row, t, head // K_GROUP, there, d, D)
            scores += dot(q_, tl.trans(k_), DTYPE, PRECISION)
        S_ = load_state(S, d, D, STEP_ROW, dv, DV, STEP_COLUMN)
        out += dot(q_, S_, DTYPE, PRECISION)
        if NORMALIZE:
            column = tl.load(S + d * STEP_ROW + DV * STEP_COLUMN, mask=d < D, other=0)
            sum_ += tl.sum(q_ * column[None, :], axis=1)
    out *= scale_q
    sum_ *= scale_q
    if AFFINE:
        u_ = load_column(u, row, t, head, there)
        last = tl.load(S + D * STEP_ROW + dv * STEP_COLUMN, mask=dv < DV, other=0)
        out += u_[:, None] * last[None, :]
        if NORMALIZE:
            sum_ += u_ * tl.load(S + D * STEP_ROW + DV * STEP_COLUMN)
    if PAIRS == 1:
        i = tl.arange(0, C)
        seen = (i[:, None] <= i[None, :]) if REVERSED else (i[:, None] >= i[None, :])
        scores *= scale_q * scale_k
        if AFFINE:
            w_ = load_column(w, row, t, head, there)
            scores += u_[:, None] * w_[None, :]
        if DECAY:
            g_ = load_column(g, row, t, head, there)
            L = cumulate(g_)
            # From the query to the state: before the chunk, or (REVERSED) after it.
            factor = fade(total_of(g_) - L) if REVERSED else fade(L)
            out *= factor[:, None]
            sum_ *= factor
            apart = (L[None, :] - L[:, None]) if REVERSED else (L[:, None] - L[None, :])
            scores *= fade(apart)
        scores = tl.where(seen, scores, 0.0)
        if NORMALIZE:
            v_one_ = load_column(v_one, row, t, head, there)
            sum_ += tl.sum(scores * v_one_[None, :], axis=1)
    if PAIRS == 2:
        scores = load_pairs(pairs, chunk, H, head, C, REVERSED)
    if PAIRS > 0:
        v_ = load_tile(v, row, t, head // V_GROUP, there, dv, DV)
        out += dot(scores, v_, DTYPE, PRECISION) * scale_v
    out *= scale_o
    if NORMALIZE:
        out = tl.where(there[:, None], out / sum_[:, None], 0.0)
        if tl.program_id(2) == 0:
            store_column(sums, tl.where(there, sum_, 1.0), row, t, head, own)
    store_tile(o, out, row, t, head, own, dv, DV)
