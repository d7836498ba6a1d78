"""Multi-head softmax attention over torch's scaled_dot_product_attention: the twin to swap in."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn.feature_maps import normalised
from linattn.layers._arguments import (
    blank_padding,
    check_forward,
    per_head,
    require_choice,
    require_dropout,
)
from linattn.layers.cache import KeyValueCache
from linattn.layers.family import Family
from linattn.layers.rotary import positions_of, require_rope, rotary, tokens_seen


class SoftmaxAttention(nn.Module):
    """Softmax attention with the forward signature of `LinearAttention`.

    Args:
        dim: channels of x.
        num_heads: heads of the queries.
        num_key_heads: heads of the keys and values, a divisor of num_heads; default num_heads.
        key_dim: channels of a query and key head, default dim / num_heads.
        value_dim: channels of a value head, default dim / num_heads.
        causal: whether a token sees only itself and those before it.
        scale: factor on q . k, default key_dim ** -0.5.
        qk_norm: "l2" gives q and k unit norm; None leaves them.
        dropout: dropout rate of the attention weights, in training only.
        projection_bias: whether the four projections have a bias.
        rope: base of the rotary position embedding, 10000.0 say; None: no positions.
        window: how many tokens a token sees, itself the last of them; None: all before it.

    Parameters: dim num_heads (key_dim + value_dim) + dim num_key_heads (key_dim + value_dim);
    4 dim^2 with the defaults.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family("x Wq", "x Wk", "x Wv", "1", "1", "softmax")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        qk_norm: str | None = None,
        dropout: float = 0.0,
        projection_bias: bool = False,
        rope: float | None = None,
        window: int | None = None,
    ):
        super().__init__()
        check.require_positive_int("dim", dim)
        check.require_positive_int("num_heads", num_heads)
        self.dim, self.num_heads = dim, num_heads
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        check.require_positive_int("num_key_heads", self.num_key_heads)
        if num_heads % self.num_key_heads != 0:
            expected = f"a divisor of num_heads = {num_heads}"
            check.reject("num_key_heads", num_key_heads, expected)
        self.key_dim = per_head("key_dim", key_dim, dim, num_heads)
        self.value_dim = per_head("value_dim", value_dim, dim, num_heads)
        require_choice("qk_norm", qk_norm, (None, "l2"))
        require_dropout(dropout)
        check.require_bool("causal", causal)
        check.require_bool("projection_bias", projection_bias)
        self.scale = self.key_dim**-0.5 if scale is None else scale
        check.require_number("scale", self.scale)
        require_rope(rope, self.key_dim)
        if window is not None:
            check.require_positive_int("window", window)
            if not causal:
                check.reject("window", f"{window} with causal=False", "None: every token sees all")
        self.causal, self.qk_norm, self.dropout = causal, qk_norm, dropout
        self.rope, self.window = rope, window
        self.q_proj = nn.Linear(dim, num_heads * self.key_dim, bias=projection_bias)
        self.k_proj = nn.Linear(dim, self.num_key_heads * self.key_dim, bias=projection_bias)
        self.v_proj = nn.Linear(dim, self.num_key_heads * self.value_dim, bias=projection_bias)
        self.o_proj = nn.Linear(num_heads * self.value_dim, dim, bias=projection_bias)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, KeyValueCache]:
        """Mix the tokens of x [B, N, dim]; arguments and result as `LinearAttention.forward`."""
        check_forward(x, self.dim, self.causal, cache, KeyValueCache, return_cache, cu_seqlens)
        before = None if cache is None else cache.seen
        q, k, v = self.project(blank_padding(x, mask), positions_of(mask, x, before))
        if cu_seqlens is not None:
            return self.merge(self._packed(q, k, v, mask, cu_seqlens))
        there = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        seen = KeyValueCache(k, v, there, tokens_seen(mask, x, before))
        if cache is not None:
            _check_cache(cache, seen)
            kept = (torch.cat([old, new], 1) for old, new in zip(cache[:3], seen[:3], strict=True))
            key, value, there = kept
            seen = KeyValueCache(key, value, there, seen.seen)
        padded = mask is not None or cache is not None
        y = self.merge(self._attend(q, seen.key, seen.value, seen.mask if padded else None))
        return (y, self._in_window(seen)) if return_cache else y

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, N, H, Dk], k [B, N, Hk, Dk] and v [B, N, Hk, Dv] of x [B, N, dim].

        positions: [N] or [B, N], of the rotary embedding.
        """
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.key_dim))  # [B, N, H, Dk]
        k = self.k_proj(x).unflatten(-1, (self.num_key_heads, self.key_dim))  # [B, N, Hk, Dk]
        v = self.v_proj(x).unflatten(-1, (self.num_key_heads, self.value_dim))  # [B, N, Hk, Dv]
        if self.qk_norm == "l2":
            q, k = normalised(q), normalised(k)
        if self.rope is not None:
            q, k = rotary(q, positions, self.rope), rotary(k, positions, self.rope)
        return q.to(v.dtype), k.to(v.dtype), v  # autocast takes a norm to float32

    def merge(self, o: Tensor) -> Tensor:
        """Return y [B, N, dim] for the heads o [B, N, H, Dv]."""
        y: Tensor = self.o_proj(o.flatten(-2))
        return y

    def _in_window(self, seen: KeyValueCache) -> KeyValueCache:
        """Return the window - 1 last tokens of each row: the most that a next one sees."""
        if self.window is None or seen.mask.shape[1] < self.window:
            return seen
        slots = torch.arange(seen.mask.shape[1], device=seen.mask.device)
        order = torch.where(seen.mask, slots, -1).sort(dim=1, stable=True).indices
        last = order[:, order.shape[1] - self.window + 1 :]  # [B, window - 1]
        key, value = (
            x.gather(1, last[:, :, None, None].expand(-1, -1, *x.shape[2:]))
            for x in (seen.key, seen.value)
        )
        return KeyValueCache(key, value, seen.mask.gather(1, last), seen.seen)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens: Tensor
    ) -> Tensor:
        check.check_cu_seqlens(cu_seqlens, q)
        if torch.compiler.is_compiling():  # one graph for all bounds: N x N comparisons
            tokens = torch.arange(q.shape[1], device=q.device)
            sequence = torch.searchsorted(cu_seqlens[1:].to(q.device), tokens, right=True)
            return self._attend(q, k, v, mask, sequence[:, None] == sequence)
        bounds = check.sequence_bounds(cu_seqlens, q.shape[1])
        parts = [
            self._attend(q[:, i:j], k[:, i:j], v[:, i:j], None if mask is None else mask[:, i:j])
            for i, j in pairwise(bounds)
        ]
        return torch.cat(parts, dim=1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, there: Tensor | None, same: Tensor | None = None
    ) -> Tensor:
        """Return o [B, Nq, H, Dv]; the queries are the last Nq of the Nk keys' tokens.

        same [Nq, Nk]: whether two tokens are of one sequence.
        """
        Nq, Nk = q.shape[1], k.shape[1]
        allowed: Tensor | None = None
        if (same is not None or self.window is not None) and there is None:
            there = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
        if there is not None:
            allowed = there[:, None, None, :].expand(-1, 1, Nq, Nk)  # [B, 1, Nq, Nk]
            if same is not None:
                allowed = allowed & same
            if self.causal:
                ones = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device)
                allowed = allowed & ones.tril(Nk - Nq)
            if self.window is not None:  # in tokens that are there: padding does not count
                place = there.long().cumsum(1)  # [B, Nk]
                distance = place[:, None, Nk - Nq :, None] - place[:, None, None, :]
                allowed = allowed & (distance < self.window)
            # A row that sees nothing has no softmax; let padding see itself, and blank it below.
            itself = torch.eye(Nq, Nk, dtype=torch.bool, device=q.device).roll(Nk - Nq, 1)
            allowed = allowed | (itself & ~there[:, None, Nk - Nq :, None])
        o = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and allowed is None,
            scale=self.scale,
            enable_gqa=self.num_key_heads != self.num_heads,
        ).transpose(1, 2)  # [B, Nq, H, Dv]
        return o if there is None else o.masked_fill(~there[:, Nk - Nq :, None, None], 0)

    def state_size(self, num_tokens: int) -> int:
        """Return how many numbers a batch row keeps after num_tokens: as many as the window."""
        if self.window is not None:
            num_tokens = min(num_tokens, self.window - 1)
        return num_tokens * self.num_key_heads * (self.key_dim + self.value_dim)

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return (
            f"num_heads={self.num_heads}, num_key_heads={self.num_key_heads}, "
            f"causal={self.causal}, scale={self.scale:.4g}, qk_norm={self.qk_norm!r}, "
            f"dropout={self.dropout}, rope={self.rope}, window={self.window}"
        )


def _check_cache(cache: KeyValueCache, seen: KeyValueCache) -> None:
    lengths = [x.shape[1] for x in cache[:3] if x.dim() > 1]
    if len(set(lengths)) > 1:
        check.reject("cache", f"key, value and mask of {lengths} tokens", "as many of each")
    for name, old, new in zip(KeyValueCache._fields, cache, seen, strict=True):
        check.require_tensor(f"cache.{name}", old)
        if old.dtype != new.dtype:
            check.reject(f"cache.{name}", old.dtype, str(new.dtype), kind=TypeError)
        if old.device != new.device:
            check.reject(f"cache.{name}", f"device {old.device}", f"device {new.device}, as x")
        if name == "seen":
            continue
        rest = old.shape[:1] + old.shape[2:]
        if old.dim() != new.dim() or rest != new.shape[:1] + new.shape[2:]:
            expected = f"{[new.shape[0], 'N', *new.shape[2:]]}: that of this layer and batch"
            check.reject(f"cache.{name}", f"shape {list(old.shape)}", expected.replace("'", ""))
