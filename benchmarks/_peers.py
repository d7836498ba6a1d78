"""The public options that the CPU kernels are compared with, each as a function of [B, N, H, D].

What is not installed is left out. All of them compute what `linear_attention` does on the same
tensors, with scale D ** -0.5; `cpu_peers.py` checks that before it measures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linattn import linear_attention

Peer = Callable[..., Tensor]

# What a case hands to `linear_attention` beside q, k and v.
KINDS = ("none", "affine", "head", "token", "channel", "delta", "delta token", "delta channel")


def options(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Any]:
    """Return gates (tensors) and options of a kind."""
    found: dict[str, Any] = {}
    decay = kind.removeprefix("delta").strip()
    sizes = {"head": shape[2:3], "token": shape[:3], "channel": shape}
    if decay in sizes:
        found["log_decay"] = -0.1 * torch.rand(sizes[decay], generator=generator)
    if kind.startswith("delta"):
        found["beta"] = torch.rand(shape[:3], generator=generator)
    if kind == "affine":
        found |= {"bias": 1.0, "normalize": True}
    return found


def peers(kind: str) -> dict[str, Peer]:
    """Return the public options for a kind, by name; functions of (q, k, v, **options)."""
    found: dict[str, Peer] = {"linattn chunked": partial(linear_attention, backend="chunked")}
    if kind == "none":
        found |= {"naive": _naive, "quadratic": _quadratic} | _fast_transformers()
    with suppress(ImportError):
        found |= _transformers(kind)
    return found


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scaled_dot_product_attention of torch, causal: another function, at the same shapes."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Autograd over one D x D state for every token."""
    states = torch.einsum("bnhk,bnhv->bnhkv", k, v).cumsum(1)
    return torch.einsum("bnhkv,bnhk->bnhv", states, q) * q.shape[-1] ** -0.5


def _quadratic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All N x N weights."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5
    return torch.matmul(weights.tril(), v).transpose(1, 2)


def _fast_transformers() -> dict[str, Peer]:
    try:
        from fast_transformers.causal_product import causal_dot_product
    except ImportError:
        return {}

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return causal_dot_product(q * q.shape[-1] ** -0.5, k, v).transpose(1, 2)

    return {"pytorch-fast-transformers": product}


def _transformers(kind: str) -> dict[str, Peer]:
    """The plain torch paths that Hugging Face models take on a CPU."""
    if kind == "token":
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        def mamba2(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
            # It decays by exp(A dt) and writes dt x: A = -1, dt = -log_decay, x = v / dt.
            dt = -log_decay
            A = -torch.ones(v.shape[2])
            o = mamba2_chunk_scan(v / dt[..., None], dt, A, k, q, 256)
            o = o[0] if isinstance(o, tuple) else o
            return o.to(q.dtype) * q.shape[-1] ** -0.5

        return {"transformers mamba2_chunk_scan": mamba2}
    if kind == "delta token":
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen

        def rule(function: Any, q: Tensor, k: Tensor, v: Tensor, **gates: Tensor) -> Tensor:
            o: Tensor = function(
                q, k, v, g=gates["log_decay"], beta=gates["beta"], initial_state=None,
                output_final_state=False,
            )[0]  # fmt: skip
            return o

        return {
            f"transformers {name}": partial(rule, getattr(qwen, name))
            for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
        }
    if kind == "delta channel":
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

        def kimi(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
            o: Tensor = chunk_kimi_delta_attention(q, k, v, log_decay, beta)[0]
            return o

        return {"transformers chunk_kimi_delta_attention": kimi}
    return {}
