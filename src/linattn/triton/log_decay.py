"""The gradient of a log-decay of one number a token: the sum over all that crosses it.

    dg_t = sum_{j < t <= i} w_ij dw_ij          pairs inside the chunk
         + sum_{i >= t} what i reads of the state before the chunk, times its gradient
         + sum_{j < t} what j leaves to the state after, times its gradient
         + <total S, Z>                          what passes through the whole chunk

Nothing that does not cross t enters, so there is no cancellation, as there is in the usual
q . dq - k . dk summed from the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.triton.numerics import cumulate, dot, fade, total_of
from linattn.triton.tiles import chunk_of, load_column, load_state, load_tile, store_column


@triton.jit
def store_crossed(
    dg, pairs, table, chunk, mask, row, t, head, own, C: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Write the sum of pairs [i, j] over j < t <= i to dg [B, N, H].

    Summed over the columns up to t - 1 it stands in column t - 1, so it is written one token on.
    """
    i = tl.arange(0, C)
    before = tl.cumsum(pairs, axis=1)
    crossed = tl.sum(tl.where(i[:, None] > i[None, :], before, 0.0), axis=0)
    _, t_next, there_next, own_next = chunk_of(table, chunk, mask, C, MASKED, 1)
    store_column(
        dg, tl.where(there_next, crossed, 0.0), row, t_next, head, own_next & (i + 1 < C)
    )  # fmt: skip
    store_column(dg, tl.zeros([C], tl.float32), row, t, head, own & (i == 0))


@triton.jit
def crossing_kernel(
    q, u, k, w, v, v_one, grad, grad_one, g, mask, table, S, Z, dg, dg_pairs, scale,
    H, Q_GROUP, K_GROUP, V_GROUP, D, DV,
    C: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, AFFINE: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the two parts of dg [B, N, H] in float32; one program a chunk and head.

    grad and grad_one are the gradients of the numerator and the normaliser; S and Z [chunks, H,
    D (+ 1), DV (+ 1)] the states before and the gradients of the states after the chunks.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, t, there, own = chunk_of(table, chunk, mask, C, MASKED)
    columns = DV + AFFINE
    S += (chunk * H + head) * (D + AFFINE) * columns
    Z += (chunk * H + head) * (D + AFFINE) * columns
    scores, d_scores = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    read, left = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    passed = tl.zeros([BD], tl.float32)
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        q_ = load_tile(q, row, t, head // Q_GROUP, there, d, D) * scale
        k_ = load_tile(k, row, t, head // K_GROUP, there, d, D)
        scores += dot(q_, tl.trans(k_), DTYPE, PRECISION)
        for start_v in range(0, DV, BV):
            e = start_v + tl.arange(0, BV)
            S_, Z_ = (
                load_state(S, d, D, columns, e, DV, 1),
                load_state(Z, d, D, columns, e, DV, 1),
            )
            grad_ = load_tile(grad, row, t, head, there, e, DV)
            v_ = load_tile(v, row, t, head // V_GROUP, there, e, DV)
            read += tl.sum(dot(q_, S_, DTYPE, PRECISION) * grad_, axis=1)
            left += tl.sum(dot(k_, Z_, DTYPE, PRECISION) * v_, axis=1)
            passed += tl.sum(S_ * Z_, axis=1)
    for start_v in range(0, DV, BV):
        e = start_v + tl.arange(0, BV)
        grad_ = load_tile(grad, row, t, head, there, e, DV)
        v_ = load_tile(v, row, t, head // V_GROUP, there, e, DV)
        d_scores += dot(grad_, tl.trans(v_), DTYPE, PRECISION)
    through = tl.sum(passed, axis=0)
    if AFFINE:
        u_, w_ = load_column(u, row, t, head, there), load_column(w, row, t, head, there)
        v_one_ = load_column(v_one, row, t, head, there)
        grad_one_ = load_column(grad_one, row, t, head, there)
        scores += u_[:, None] * w_[None, :]
        d_scores += grad_one_[:, None] * v_one_[None, :]
        for start in range(0, D, BD):  # the last column
            d = start + tl.arange(0, BD)
            q_ = load_tile(q, row, t, head // Q_GROUP, there, d, D) * scale
            k_ = load_tile(k, row, t, head // K_GROUP, there, d, D)
            s_ = tl.load(S + d * columns + DV, mask=d < D, other=0)
            z_ = tl.load(Z + d * columns + DV, mask=d < D, other=0)
            read += tl.sum(q_ * s_[None, :], axis=1) * grad_one_
            left += tl.sum(k_ * z_[None, :], axis=1) * v_one_
            through += tl.sum(s_ * z_, axis=0)
        for start_v in range(0, DV, BV):  # the last row
            e = start_v + tl.arange(0, BV)
            grad_ = load_tile(grad, row, t, head, there, e, DV)
            v_ = load_tile(v, row, t, head // V_GROUP, there, e, DV)
            s_ = tl.load(S + D * columns + e, mask=e < DV, other=0)
            z_ = tl.load(Z + D * columns + e, mask=e < DV, other=0)
            read += tl.sum(grad_ * s_[None, :], axis=1) * u_
            left += tl.sum(v_ * z_[None, :], axis=1) * w_
            through += tl.sum(s_ * z_, axis=0)
        s_, z_ = tl.load(S + D * columns + DV), tl.load(Z + D * columns + DV)
        read += s_ * u_ * grad_one_
        left += z_ * w_ * v_one_
        through += s_ * z_
    g_ = load_column(g, row, t, head, there)
    L, last = cumulate(g_), total_of(g_)
    i = tl.arange(0, C)
    earlier = i[:, None] < i[None, :]  # [j, t]: j < t
    pairs = tl.where(earlier, 0.0, scores * d_scores * fade(L[:, None] - L[None, :]))
    store_crossed(dg_pairs, pairs, table, chunk, mask, row, t, head, own, C, MASKED)
    reads = read * fade(L)
    dg_ = tl.sum(tl.where(earlier, 0.0, reads[:, None]), axis=0)
    leaves = left * fade(last - L)
    dg_ += tl.sum(tl.where(earlier, leaves[:, None], 0.0), axis=0)
    dg_ += through * fade(last)
    store_column(dg, tl.where(there, dg_, 0.0), row, t, head, own)
