"""One token: the recurrence itself, without chunks. Plain torch, so autograd differentiates it.

What autograd keeps of one step is one state, which is what the caller holds anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn._validation import state_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    mask: Tensor | None, state: Tensor | None, out_state: Tensor | None,
    scale: float, bias: float, normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, 1, H, Dv] and the state after the token, out_state where that is the state."""
    B = q.shape[0]
    H, Dv = max(q.shape[2], k.shape[2], v.shape[2]), v.shape[3]
    dtype = state_dtype(q.dtype)
    affine = bias != 0.0 or normalize
    absent = None if mask is None else ~mask[:, :, None]  # [B, 1, 1]
    q_, k_, v_ = (_token(x, H, dtype, absent) for x in (q, k, v))  # [B, H, D]
    q_ = q_ * scale
    if affine:
        one = torch.ones(B, H, 1, dtype=dtype, device=q.device)
        if absent is not None:
            one = one.masked_fill(absent, 0)
        q_, k_, v_ = (torch.cat(pair, -1) for pair in ((q_, bias * one), (k_, one), (v_, one)))
    if state is None:
        S = torch.zeros(B, H, k_.shape[2], v_.shape[2], dtype=dtype, device=q.device)
    else:
        S = state
    # In place only in the state itself: other memory may overlap an input, and the caller copies.
    given = (q, k, v, log_decay, beta)
    in_place = out_state is not None and out_state is state and not _may_overlap(state, given)
    if log_decay is not None:
        g = log_decay[None] if log_decay.dim() == 1 else log_decay[:, 0]  # [1 or B, H (, Dk)]
        g = g.to(dtype)
        if absent is not None:
            g = torch.where(absent[..., 0] if g.dim() == 2 else absent, 0, g)
        alpha = g.exp()[..., None]  # [1 or B, H (, Dk), 1]
        alpha = alpha[..., None] if alpha.dim() == 3 else alpha
        S = S.mul_(alpha) if in_place else S * alpha
    if beta is not None:
        beta_ = beta[:, 0, :, None].to(dtype)  # [B, H, 1]
        if absent is not None:
            beta_ = beta_.masked_fill(absent, 0)
        recalled = torch.matmul(k_[:, :, None], S)[:, :, 0]  # [B, H, Dv]
        v_ = beta_ * (v_ - recalled)
    write = k_[..., None], v_[:, :, None]  # [B, H, Dk, 1], [B, H, 1, Dv]
    S = S.addcmul_(*write) if in_place else torch.addcmul(S, *write)
    o = torch.matmul(q_[:, :, None], S)[:, :, 0]  # [B, H, Dv (+ 1)]
    if affine:
        sums, o = o[..., Dv:], o[..., :Dv]
        if normalize:
            o = o / (sums if absent is None else sums.masked_fill(absent, 1))
    if absent is not None:  # whatever the state holds
        o = o.masked_fill(absent, 0)
    return o[:, None].to(q.dtype), S


def _may_overlap(state: Tensor, inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether writing the state may change an input; a graph decides by itself what is in place."""
    given = [state, *(x for x in inputs if x is not None)]
    if torch.compiler.is_compiling() or any(map(torch._C._functorch.is_batchedtensor, given)):
        return True
    own = state.untyped_storage().data_ptr()
    return any(x is not None and x.untyped_storage().data_ptr() == own for x in inputs)


def _token(x: Tensor, H: int, dtype: torch.dtype, absent: Tensor | None) -> Tensor:
    """Return the one token of x [B, 1, Hx, D] as [B, H, D], 0 where it is not there."""
    B, _, Hx, D = x.shape
    x = x[:, 0].to(dtype)
    if absent is not None:
        x = x.masked_fill(absent, 0)
    return x[:, :, None].expand(B, Hx, H // Hx, D).reshape(B, H, D) if Hx != H else x
