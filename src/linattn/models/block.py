"""A layer of the model: mixer and gated feed-forward part, and softmax attention over any cache."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from linattn.layers import SoftmaxAttention
from linattn.models import caching, mixers
from linattn.models.configuration import LinattnConfig


class GatedFeedForward(nn.Module):
    """SwiGLU: (silu(x W_gate) * x W_up) W_down (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, N, dim] token by token."""
        y: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(GradientCheckpointingLayer):
    """Pre-norm mixer and feed-forward part, each added to x; of width 0 there is no such part."""

    def __init__(self, config: LinattnConfig, index: int):
        super().__init__()
        self.index = index
        dim, eps, affine = config.hidden_size, config.rms_norm_eps, config.norm_affine
        self.mixer_norm = nn.RMSNorm(dim, eps, affine)
        self.mixer = mixers.build(config, index)
        self.feed_forward: GatedFeedForward | None = None
        if config.intermediate_size:
            self.feed_forward_norm = nn.RMSNorm(dim, eps, affine)
            self.feed_forward = GatedFeedForward(dim, config.intermediate_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        visible: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Map x [B, N, dim]; mask [B, N] and visible [B, 1, N, Nk] say what is padding."""
        y = self._mix(self.mixer_norm(x), mask, visible, positions, cu_seqlens, cache)
        x = x + self.dropout(y)
        if self.feed_forward is None:
            return x
        y = self.feed_forward(self.feed_forward_norm(x))
        return x + self.dropout(y)

    def _mix(
        self,
        x: Tensor,
        mask: Tensor | None,
        visible: Tensor | None,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        mixer, y = self.mixer, x
        if isinstance(mixer, SoftmaxAttention) and positions is not None:
            return attend(mixer, x, visible, positions, cache, self.index)
        if cache is None:
            y = mixer(x, mask=mask, cu_seqlens=cu_seqlens)
        else:
            before = caching.read(cache, self.index, mixer)
            y, after = mixer(x, mask=mask, cache=before, return_cache=True)
            caching.write(cache, self.index, after)
        return y


def attend(
    mixer: SoftmaxAttention,
    x: Tensor,
    visible: Tensor | None,
    positions: Tensor,
    cache: Cache | None,
    index: int,
) -> Tensor:
    """Softmax attention whose keys and values are in any cache of transformers."""
    q, k, v = mixer.project(x, positions)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, N, D]
    if cache is not None:
        k, v = cache.update(k, v, index)
    several = True if x.shape[1] > 1 else False  # noqa: SIM210  (a bool in a graph)
    o = nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=mixer.dropout if mixer.training else 0.0,
        is_causal=several and visible is None,
        scale=mixer.scale,
        enable_gqa=mixer.num_key_heads != mixer.num_heads,
    )
    return mixer.merge(o.transpose(1, 2))
