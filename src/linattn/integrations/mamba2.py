"""Mamba-2's scan and step as transformers' models call them; states [B, H, Dv, Dk]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn.integrations.arguments import bounds, is_recorded, refuse_others
from linattn.ops import linear_attention
from linattn.selective_scan import selective_scan


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return nn.functional.softplus(dt) if softplus else dt


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t, in float32.

    hidden_states x [Bt, N, H, P], dt [Bt, N, H], A [H], B and C [Bt, N, G, n]; states
    [Bt, H, P, n]. Returns y [Bt, N, H, P] in float32, as the plain form does.
    """
    refuse_others("mamba_chunk_scan_combined", kwargs)
    dt = torch.clamp(_step_size(dt, dt_bias, dt_softplus), *dt_limit).float()
    x = hidden_states.float()
    packed = bounds(cu_seq_lens_q if cu_seqlens is None else cu_seqlens, seq_idx, x.shape[1])
    y, state = linear_attention(
        C.float(),
        B.float(),
        x * dt[..., None],
        A.float() * dt,
        scale=1.0,
        initial_state=None if initial_states is None else initial_states.float().mT.contiguous(),
        return_state=True,
        cu_seqlens=packed,
    )
    if D is not None:
        y = y + D[..., None] * x
    if z is not None:
        y = y * nn.functional.silu(z)
    return (y, state.mT) if return_final_states else y


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Take one step of `mamba2_chunk_scan`; state [Bt, H, P, n] is updated.

    hidden_states x [Bt, H, P]; dt [Bt, H, P], A [H, P, n], D and dt_bias [H, P] alike in P and n,
    as these models have them; B and C [Bt, G, n].
    """
    refuse_others("selective_state_update", kwargs)
    plain = state.dtype == torch.float32 and state.is_contiguous() and B.shape[1] == 1
    if plain and not is_recorded(state, hidden_states, dt, A, B, C, D, dt_bias, z):
        return _one_group(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
    bias = None if dt_bias is None else dt_bias[:, 0]
    step = _step_size(dt[..., 0], bias, dt_softplus).float()  # [Bt, H]
    x = hidden_states.float()
    y, after = linear_attention(
        C.float()[:, None],  # [Bt, 1, G, n]
        B.float()[:, None],
        (x * step[..., None])[:, None],
        (A[:, 0, 0].float() * step)[:, None],
        scale=1.0,
        initial_state=state.float().mT.clone(memory_format=torch.contiguous_format),
        return_state=True,
    )
    state.copy_(after.mT)
    out = y[:, 0]
    if D is not None:
        out = out + x * D
    if z is not None:
        out = out * nn.functional.silu(z)
    return out.to(hidden_states.dtype)


def _one_group(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, z: Tensor | None,
) -> Tensor:  # fmt: skip
    """Take the step where all heads share B and C: a selective scan of H P channels, in place."""
    rows, (H, P, n) = x.shape[0], A.shape

    def channels(y: Tensor) -> Tensor:
        return y.reshape(*y.shape[:-2], H * P).float()

    own = state.view(rows, H * P, n)
    rates = A[..., 0].reshape(H * P, 1).float().expand(H * P, n)  # one for all states of a channel
    o = selective_scan(
        channels(x)[:, None], channels(dt)[:, None], rates, B.float(), C.float(),
        None if D is None else channels(D),
        z=None if z is None else channels(z)[:, None],
        dt_bias=None if dt_bias is None else channels(dt_bias), dt_softplus=softplus,
        initial_state=own, out_state=own,
    )  # fmt: skip
    return o.view(rows, H, P).to(x.dtype)
