"""Short convolutions as transformers' models call them; states [B, C, taps], the newest last."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from linattn.convolution import MOST_TAPS, causal_conv1d
from linattn.integrations.arguments import bounds, is_recorded, refuse_others


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve x [B, C, N] with more taps than the operator takes, in torch."""
    padded = nn.functional.pad(x, (weight.shape[1] - 1, 0))
    return nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[1])


def _activated(o: Tensor, activation: str | None, *, silu: bool = False) -> Tensor:
    """Apply an activation that the operator has not; `silu`: nor has it applied that."""
    if activation is None or (activation in ("silu", "swish") and not silu):
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
    packed = bounds(cu_seq_lens_q, seq_idx, hidden_states.shape[2])
    if weight.shape[1] > MOST_TAPS and packed is None:
        o = _wide(hidden_states.to(weight.dtype), weight, bias)
        return _activated(o, activation, silu=True).to(hidden_states.dtype)
    o = causal_conv1d(
        hidden_states.transpose(1, 2).to(weight.dtype),
        weight,
        bias,
        activation="silu" if activation in ("silu", "swish") else None,
        cu_seqlens=packed,
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
    taps, kept, N = weight.shape[1], conv_state.shape[2], hidden_states.shape[2]
    silu: Literal["silu"] | None = "silu" if activation in ("silu", "swish") else None
    x = hidden_states.to(weight.dtype).transpose(1, 2)
    if (
        taps <= MOST_TAPS
        and kept >= taps
        and taps > N
        and conv_state.dtype == weight.dtype
        and not is_recorded(hidden_states, conv_state, weight, bias)
    ):  # the convolution's own state is the last taps - 1 of them, updated where they stand
        older = kept - (taps - 1)
        conv_state[:, :, :older] = conv_state[:, :, N : N + older].clone()
        own = conv_state[:, :, older:].transpose(1, 2)
        o = causal_conv1d(x, weight, bias, activation=silu, initial_state=own, out_state=own)
        return _activated(o, activation).to(hidden_states.dtype).transpose(1, 2)
    inputs = torch.cat([conv_state, hidden_states], dim=2).to(weight.dtype)  # [B, C, K + N]
    conv_state.copy_(inputs[:, :, -kept:])
    if taps > MOST_TAPS:
        o = _wide(inputs, weight, bias)[:, :, -N:]
        return _activated(o, activation, silu=True).to(hidden_states.dtype)
    before = inputs[:, :, kept - (taps - 1) : kept].transpose(1, 2).contiguous()  # [B, W - 1, C]
    o = causal_conv1d(x, weight, bias, activation=silu, initial_state=before)
    return _activated(o, activation).to(hidden_states.dtype).transpose(1, 2)
