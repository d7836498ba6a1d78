"""Mamba-1's selective scan and step as transformers' models call them; states [B, E, n]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn._validation import state_dtype
from linattn.integrations.arguments import bounds, is_recorded, refuse_others
from linattn.selective_scan import selective_scan


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, state: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run `selective_scan`, what has another dtype than x in float32 as the plain form has it."""
    dtype = x.dtype if z is None else torch.promote_types(x.dtype, z.dtype)
    wide = state_dtype(dtype)

    def fits(y: Tensor | None) -> Tensor | None:
        return y if y is None or y.dtype == dtype else y.to(wide)

    dt, A, B, C = (y if y.dtype == dtype else y.to(wide) for y in (dt, A, B, C))
    o, after = selective_scan(
        x.to(dtype), dt, A, B, C, fits(D),
        z=None if z is None else z.to(dtype), dt_bias=fits(dt_bias), dt_softplus=softplus,
        initial_state=None if state is None else state.to(wide), return_state=True, **options,
    )  # fmt: skip
    return o.to(x.dtype), after


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = (C_t h_t + D x_t) silu(z_t).

    hidden_states x, dt, z [Bt, E, N], A [E, n], B and C [Bt, n, N]; returns y [Bt, E, N] and with
    `return_last_state` h [Bt, E, n] in float32.
    """
    refuse_others("selective_scan_fn", kwargs)
    given = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    o, state = _scan(
        hidden_states.transpose(1, 2), dt.transpose(1, 2), A, B.transpose(1, 2),
        C.transpose(1, 2), D, None if z is None else z.transpose(1, 2), delta_bias,
        delta_softplus, None, cu_seqlens=bounds(given, seq_idx, hidden_states.shape[2]),
    )  # fmt: skip
    o = o.transpose(1, 2)
    return (o, state) if return_last_state else o


def mamba_selective_state_update(
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
    """Take one step of `mamba_selective_scan`; state [Bt, E, n] is updated.

    hidden_states x, dt, z [Bt, E], A [E, n], B and C [Bt, n].
    """
    refuse_others("selective_state_update", kwargs)
    dtype = hidden_states.dtype if z is None else torch.promote_types(hidden_states.dtype, z.dtype)
    in_place = state.dtype == state_dtype(dtype) and not is_recorded(
        state, hidden_states, dt, A, B, C, D, dt_bias, z
    )
    o, after = _scan(
        hidden_states[:, None], dt[:, None], A, B[:, None], C[:, None], D,
        None if z is None else z[:, None], dt_bias, dt_softplus,
        state if in_place else state.clone(),  # which autograd keeps
        out_state=state if in_place else None,
    )  # fmt: skip
    if not in_place:
        state.copy_(after)
    return o[:, 0]
