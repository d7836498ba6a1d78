"""The additive recurrence, token by token: S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T.

Shapes: q, k [B, N, H, Dk]; v [B, N, H, Dv]; log_decay [B, N, H] or [B, N, H, Dk]; state
[B, H, Dk, Dv]. All in one dtype. Symbols: the glossary in `linattn.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decay_state(S: Tensor, g_t: Tensor) -> Tensor:
    """Return Diag(exp(g_t)) S for g_t [B, H] (one number a head) or [B, H, Dk] (one a channel)."""
    alpha_t = g_t.exp()
    return (alpha_t[..., None] if alpha_t.dim() == 3 else alpha_t[..., None, None]) * S


def zero_state(q: Tensor, v: Tensor) -> Tensor:
    """Return S_0 = 0, [B, H, Dk, Dv]."""
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])


def token_loop(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o [B, N, H, Dv] and the state after the last token."""
    S = zero_state(q, v) if S is None else S
    o = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            S = decay_state(S, log_decay[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        o.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(o, dim=1) if o else v, S  # no token: v is an empty o


def every_token_sees_all(
    q: Tensor, k: Tensor, v: Tensor, S: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """The form without causality: S is the sum over all tokens, o_t = scale * S^T q_t."""
    S = zero_state(q, v) if S is None else S
    S = S + torch.einsum("bnhk,bnhv->bhkv", k, v)
    return scale * torch.einsum("bhkv,bnhk->bnhv", S, q), S


def affine(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    present: Tensor,
    S: Tensor | None,
    *,
    scale: float,
    bias: float,
    normalize: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """The kernel w_ij = a (q_i . k_j) + b and its normaliser, in homogeneous coordinates.

    q~ = [a q, b], k~ = [k, 1], v~ = [v, 1] turn it into the plain recurrence with a
    (Dk + 1) x (Dv + 1) state, whose last column makes the sum of the weights. A token that is
    not present has no constant coordinate either. ("Towards Making Linear Attention Usable".)
    """
    one = present[..., None, None].to(q.dtype).expand(*q.shape[:3], 1)  # [B, N, H, 1]
    q_ = torch.cat([scale * q, bias * one], dim=-1)  # [B, N, H, Dk + 1]
    k_ = torch.cat([k, one], dim=-1)  # [B, N, H, Dk + 1]
    v_ = torch.cat([v, one], dim=-1)  # [B, N, H, Dv + 1]
    if causal:
        o_, S = token_loop(q_, k_, v_, log_decay, S, scale=1.0)
    else:
        o_, S = every_token_sees_all(q_, k_, v_, S, scale=1.0)
    o, weights = o_[..., :-1], o_[..., -1:]  # [B, N, H, Dv], [B, N, H, 1]
    if normalize:
        o = o / torch.where(one > 0, weights, 1)  # absent tokens: 0 / 1
    return o, S


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float,
    bias: float = 0.0,
    normalize: bool = False,
    causal: bool = True,
) -> Tensor:
    """The same without a recurrence: every weight w_ij written out, O(N^2) memory.

    w_ij = sum_d (a q_id k_jd) exp(g_{j+1,d} + ... + g_{i,d}) + b exp(...), j <= i if causal. An
    oracle that shares no code with the loops; [B, N, H, D] inputs, no state. The log-decays are
    summed over the span and not subtracted as prefix sums, so that -inf is a reset here too.
    """
    N = q.shape[1]
    later = torch.ones(N, N, dtype=torch.bool, device=q.device).tril()  # i >= j
    if log_decay is None:
        weights = scale * torch.einsum("bihd,bjhd->bhij", q, k) + bias
    else:
        g = log_decay if log_decay.dim() == 4 else log_decay[..., None]  # [B, N, H, Dk or 1]
        in_span = later[:, :, None] & later.tril(-1)[None]  # [i, t, j]: j < t <= i
        span = torch.where(in_span[None, :, :, :, None, None], g[:, None, :, None], 0).sum(2)
        kept = span.exp()  # [B, i, j, H, Dk or 1]
        weights = scale * torch.einsum("bihd,bjhd,bijhd->bhij", q, k, kept.expand(
            *kept.shape[:-1], q.shape[-1]))  # fmt: skip
        weights = weights + bias * kept[..., 0].permute(0, 3, 1, 2)
    if causal:
        weights = torch.where(later, weights, 0)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", weights, v)
