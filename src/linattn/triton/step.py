"""One token on a Triton kernel, without gradients: the recurrence itself, all heads in one call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.triton.layout import strided
from linattn.triton.numerics import finite, narrow

COLUMNS = 32  # of the state, of all Dk rows, a program updates


@triton.jit
def step_kernel(
    q, k, v, g, beta, mask, initial, state, o, scale, bias,
    H, Q_GROUP, K_GROUP, V_GROUP, D, DV,
    BD: tl.constexpr, BV: tl.constexpr, AFFINE: tl.constexpr, NORMALIZE: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, MASKED: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Update BV columns of a head's state and write what the query reads of them."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BD).to(tl.int64)  # a stride may be anything
    e = (tl.program_id(2) * BV + tl.arange(0, BV)).to(tl.int64)
    in_d, in_e = d < D, e < DV
    there = 1
    if MASKED:
        there = (tl.load(mask[0] + row * mask[1][0]) != 0).to(tl.int32)
    some_d, some_e = d < D * there, e < DV * there  # nothing of a masked token is read
    at_q = q[0] + row * q[1][0] + (head // Q_GROUP) * q[1][2]
    at_k = k[0] + row * k[1][0] + (head // K_GROUP) * k[1][2]
    at_v = v[0] + row * v[1][0] + (head // V_GROUP) * v[1][2]
    q_ = tl.load(at_q + d * q[1][3], mask=some_d, other=0).to(tl.float32) * scale
    k_ = tl.load(at_k + d * k[1][3], mask=some_d, other=0).to(tl.float32)
    v_ = tl.load(at_v + e * v[1][3], mask=some_e, other=0).to(tl.float32)
    columns = DV + AFFINE
    base = (row * H + head) * (D + AFFINE) * columns
    places = base + d[:, None] * columns + e[None, :]
    inside = in_d[:, None] & in_e[None, :]
    S = tl.zeros([BD, BV], tl.float32)
    last_row, last_column = tl.zeros([BV], tl.float32), tl.zeros([BD], tl.float32)
    corner = 0.0
    if INITIAL:
        S = tl.load(initial + places, mask=inside, other=0)
        if AFFINE:
            last_row = tl.load(initial + base + D * columns + e, mask=in_e, other=0)
            last_column = tl.load(initial + base + d * columns + DV, mask=in_d, other=0)
            corner = tl.load(initial + base + D * columns + DV)
    if DECAY > 0:
        at_g = g[0] + row * g[1][0] + head * g[1][2]
        if DECAY == 2:
            g_ = tl.load(at_g + d * g[1][3], mask=some_d, other=0).to(tl.float32)
            S *= tl.exp(finite(g_))[:, None]
        else:
            gate = tl.load(at_g, mask=there != 0, other=0).to(tl.float32)
            alpha = tl.exp(finite(gate))
            S, last_row, last_column = S * alpha, last_row * alpha, last_column * alpha
            corner = corner * alpha
    if DELTA:
        at_beta = beta[0] + row * beta[1][0] + head * beta[1][2]
        beta_ = tl.load(at_beta, mask=there != 0, other=0).to(tl.float32)
        v_ = beta_ * (v_ - tl.sum(k_[:, None] * S, axis=0))
    S += k_[:, None] * v_[None, :]
    out = tl.sum(q_[:, None] * S, axis=0)
    if AFFINE:
        one = there * 1.0
        last_row += v_ * one
        last_column += k_ * one
        corner += one
        out += bias * one * last_row
        tl.store(state + base + D * columns + e, last_row, mask=in_e)
        if tl.program_id(2) == 0:
            tl.store(state + base + d * columns + DV, last_column, mask=in_d)
            tl.store(state + base + D * columns + DV, corner)
        if NORMALIZE:
            out /= tl.sum(q_ * last_column, axis=0) + bias * one * corner
    tl.store(state + places, S, mask=inside)
    out = tl.where(there != 0, out, 0.0)
    DTYPE: tl.constexpr = o.dtype.element_ty
    tl.store(o + (row * H + head) * DV + e, narrow(out, DTYPE).to(DTYPE), mask=in_e)


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    mask: Tensor | None, state: Tensor | None, out_state: Tensor | None,
    scale: float, bias: float, normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, 1, H, Dv] and the state after the token, out_state where that is the state."""
    (B, _, _, Dk), Dv = q.shape, v.shape[3]
    H, affine = max(q.shape[2], k.shape[2], v.shape[2]), bias != 0.0 or normalize
    # The last column of the affine state is read by all programs of a head: never in place.
    in_place = out_state is state and state is not None and state.is_contiguous() and not affine
    shape = (B, H, Dk + affine, Dv + affine)
    after = state if in_place else torch.empty(shape, dtype=torch.float32, device=q.device)
    assert after is not None
    before = after if state is None else state.contiguous()
    o = v.new_empty(B, 1, H, Dv)
    kind, gate = 0, q
    if log_decay is not None:
        kind = 2 if log_decay.dim() == 4 else 1
        gate = log_decay.expand(B, 1, H) if log_decay.dim() == 1 else log_decay
    if o.numel() > 0 or after.numel() > 0:
        step_kernel[(B, H, triton.cdiv(Dv, COLUMNS))](
            strided(q), strided(k), strided(v), strided(gate),
            strided(q if beta is None else beta),
            strided(q if mask is None else mask.view(torch.uint8)),
            before, after, o, scale, bias, H, H // q.shape[2], H // k.shape[2], H // v.shape[2],
            Dk, Dv, BD=max(16, triton.next_power_of_2(Dk)), BV=COLUMNS, AFFINE=affine,
            NORMALIZE=normalize, DECAY=kind, DELTA=beta is not None, MASKED=mask is not None,
            INITIAL=state is not None,
        )  # fmt: skip
    return o, after
