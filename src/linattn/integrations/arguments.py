"""Keywords that transformers' models pass to the functions that are replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn._validation import reject

# Passed down by transformers to every layer, for other kinds of attention, other kernels, the loss.
IDLE = frozenset({
    "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen", "position_ids", "use_cache",
    "output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch",
    "return_dict", "cache_position", "chunk_size", "use_mambapy", "use_associative_scan",
    "head_first", "cpu_cu_seqlens", "position_embeddings", "is_causal", "token_type_ids",
    "labels", "shift_labels", "ignore_index", "label_smoothing",
})  # fmt: skip


def refuse_others(function: str, others: dict[str, Any]) -> None:
    """Raise for a keyword that would change the result and that nothing here reads."""
    for name, value in others.items():
        if name not in IDLE and value is not None:
            expected = f"an argument of {function}; accelerate cannot honour it"
            reject(name, type(value).__name__, expected, kind=TypeError)


def bounds(
    cu_seqlens: Tensor | None, seq_idx: Tensor | None, tokens: int
) -> Tensor | None:  # fmt: skip
    """Return cu_seqlens [S + 1] of packed sequences, told by either; None: not packed.

    seq_idx: [1, N], the number of the sequence of each token.
    """
    if cu_seqlens is not None:
        return cu_seqlens
    if seq_idx is None:
        return None
    if seq_idx.dim() != 2 or seq_idx.shape != (1, tokens):
        reject("seq_idx", f"shape {list(seq_idx.shape)}", f"[1, {tokens}]: one packed row")
    inner = (seq_idx[0].diff() != 0).nonzero()[:, 0] + 1
    ends = torch.tensor([0, tokens], device=inner.device)
    return torch.cat([ends[:1], inner, ends[1:]])


def is_recorded(*tensors: Tensor | None) -> bool:
    """Return whether autograd would record a call on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
