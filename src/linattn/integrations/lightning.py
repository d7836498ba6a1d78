"""MiniMax's lightning attention: its layer has no function to replace, so its forward is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.integrations.arguments import bounds, refuse_others
from linattn.ops import linear_attention


def minimax_lightning_attention(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run S_t = exp(-slope) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, a slope a head.

    hidden_states [B, N, C]; attention_mask [B, N], 0 where a token is padding. Returns what the
    layer's own forward does: the output and the state [B, H, D, D].
    """
    refuse_others("MiniMaxLightningAttention", kwargs)
    B, N, _ = hidden_states.shape
    H, D = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[..., None]).to(qkv.dtype)
    q, k, v = qkv.view(B, N, H, 3 * D).split(D, dim=3)
    state = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    o, after = linear_attention(
        q, k, v, -layer.slope_rate.flatten().float(), scale=1.0,
        initial_state=None if state is None else state.float(), return_state=True,
        cu_seqlens=bounds(cu_seq_lens_q, seq_idx, N),
    )  # fmt: skip
    after = after.to(hidden_states.dtype)
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, after)
    gate = torch.sigmoid(layer.output_gate(hidden_states))
    found: Tensor = layer.out_proj(gate * layer.norm(o.reshape(B, N, H * D)))
    return found, after
