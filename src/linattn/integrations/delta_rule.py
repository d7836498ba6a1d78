"""Gated delta rule and KDA as transformers' models call them; states [B, H, Dk, Dv]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.integrations.arguments import bounds, is_recorded, refuse_others
from linattn.ops import linear_attention


def _unit(x: Tensor) -> Tensor:
    """Return x over its norm in float32, as the kernels that these models were trained with."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one pass, no x * x in memory
    factor = torch.rsqrt(norm.square() + 1e-6)
    if wide is x or is_recorded(x):
        return wide * factor
    return wide.mul_(factor)  # a copy already


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
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule with decay g [B, N, Hv], or [B, N, H, Dk] a channel (KDA), in float32.

    query, key [B, N, Hk, Dk], value [B, N, Hv, Dv], Hk a divisor of Hv; states [B, Hv, Dk, Dv].
    """
    refuse_others("chunk_gated_delta_rule", kwargs)
    q, k = (_unit(x) if use_qk_l2norm_in_kernel else x.float() for x in (query, key))
    v, decay, b = (x.float() for x in (value, g, beta))
    o, state = linear_attention(
        q,
        k,
        v,
        decay,
        b,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        return_state=True,
        cu_seqlens=bounds(cu_seqlens, seq_idx, query.shape[1]),
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
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule token by token: the same result as in chunks."""
    return torch_chunk_gated_delta_rule(
        query, key, value, g, beta, 64, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, scale, cu_seqlens, seq_idx, **kwargs,
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
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run KDA: the delta rule with a decay a channel, g [B, N, H, Dk]."""
    return torch_chunk_gated_delta_rule(
        query, key, value, g, beta, chunk_size, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, scale, cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
        seq_idx, **kwargs,
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
