"""What the models of transformers call, on this library's operators.

Each function here has the name and the parameters of one in transformers' modeling files, where a
CPU runs it in plain tensor code. They name every keyword that changes the result; those that do not
are IDLE; anything else is an error, since a model that passes it would expect it to be honoured.

State layouts: the delta rules keep [B, H, Dk, Dv] as `linear_attention` does, Mamba-2
[B, H, Dv, Dk], convolutions [B, C, taps], the newest last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn.convolution import causal_conv1d
from linattn.integrations.arguments import bounds, refuse_others
from linattn.ops import linear_attention

# --- short convolutions ---------------------------------------------------------------------------


def _activated(o: Tensor, activation: str | None) -> Tensor:
    """Apply an activation that the operator has not."""
    if activation in (None, "silu", "swish"):
        return o
    from transformers.activations import ACT2FN

    found: Tensor = ACT2FN[activation](o)
    return found


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve hidden_states [B, C, N] with weight [C, W]; returns [B, C, N]."""
    refuse_others("causal_conv1d_fn", kwargs)
    o = causal_conv1d(
        hidden_states.transpose(1, 2).to(weight.dtype),
        weight,
        bias,
        activation="silu" if activation in ("silu", "swish") else None,
        cu_seqlens=bounds(cu_seq_lens_q, seq_idx, hidden_states.shape[2]),
    )
    return _activated(o, activation).to(hidden_states.dtype).transpose(1, 2)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolve the next tokens [B, C, N] behind conv_state [B, C, K], K >= W - 1, updated."""
    refuse_others("causal_conv1d_update", kwargs)
    taps, kept = weight.shape[1], conv_state.shape[2]
    inputs = torch.cat([conv_state, hidden_states], dim=2).to(weight.dtype)  # [B, C, K + N]
    conv_state.copy_(inputs[:, :, -kept:])
    before = inputs[:, :, kept - (taps - 1) : kept].transpose(1, 2).contiguous()  # [B, W - 1, C]
    o = causal_conv1d(
        inputs[:, :, kept:].transpose(1, 2),
        weight,
        bias,
        activation="silu" if activation in ("silu", "swish") else None,
        initial_state=before,
    )
    return _activated(o, activation).to(hidden_states.dtype).transpose(1, 2)


# --- delta rules ----------------------------------------------------------------------------------


def _unit(x: Tensor) -> Tensor:
    """Return x over its norm, as the kernels that these models were trained with have it."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule with decay g [B, N, Hv], or [B, N, H, Dk] a channel (KDA), in float32.

    query, key [B, N, Hk, Dk], value [B, N, Hv, Dv], Hk a divisor of Hv; states [B, Hv, Dk, Dv].
    """
    refuse_others("chunk_gated_delta_rule", kwargs)
    q, k, v, decay, b = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    o, state = linear_attention(
        q,
        k,
        v,
        decay,
        b,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        return_state=True,
        cu_seqlens=cu_seqlens,
    )
    return o.to(query.dtype), state if output_final_state else None


def torch_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule token by token: the same result as in chunks."""
    return torch_chunk_gated_delta_rule(
        query, key, value, g, beta, 64, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, scale, cu_seqlens, **kwargs,
    )  # fmt: skip


def chunk_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run KDA: the delta rule with a decay a channel, g [B, N, H, Dk]."""
    return torch_chunk_gated_delta_rule(
        query, key, value, g, beta, chunk_size, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, scale, cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
        **kwargs,
    )  # fmt: skip


def recurrent_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run KDA token by token: the same result as in chunks."""
    return chunk_kimi_delta_attention(
        query, key, value, g, beta, 64, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, **kwargs,
    )  # fmt: skip


# --- Mamba-2 --------------------------------------------------------------------------------------


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
    bias = None if dt_bias is None else dt_bias[:, 0]
    step = _step_size(dt[..., 0], bias, dt_softplus).float()  # [Bt, H]
    x = hidden_states.float()
    y, after = linear_attention(
        C.float()[:, None],  # [Bt, 1, G, n]
        B.float()[:, None],
        (x * step[..., None])[:, None],
        (A[:, 0, 0].float() * step)[:, None],
        scale=1.0,
        initial_state=state.float().mT.contiguous(),
        return_state=True,
    )
    state.copy_(after.mT)
    out = y[:, 0]
    if D is not None:
        out = out + x * D
    if z is not None:
        out = out * nn.functional.silu(z)
    return out.to(hidden_states.dtype)
