"""Multi-head linear attention: projections around `linattn.linear_attention`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.feature_maps import make_feature_map, normalised
from linattn.layers._arguments import (
    at_least_float32,
    blank_padding,
    check_forward,
    per_head,
    require_choice,
    require_dropout,
    require_heads,
)
from linattn.layers.cache import RecurrentCache, RetentionCache
from linattn.layers.family import Family
from linattn.layers.retention import retention_log_decay
from linattn.layers.rotary import positions_of, require_rope, rotary, tokens_seen
from linattn.noise import element_dropout, multiplicative_noise
from linattn.ops import linear_attention


class LinearAttention(nn.Module):
    """Linear attention with feature maps, affine kernel, decay and the stand-in for dropout.

        q, k, v = heads of x Wq, x Wk, x Wv;  y = merge(linear_attention(phi(q), phi(k), v)) Wo

    Sources: Katharopoulos et al. 2020 (feature maps); *Towards Making Linear Attention Usable* (the
    affine kernel a x + b, `normalize`, `dropout`); Sun et al. 2023 (decay="head"); Dao and Gu 2024
    (decay="token"); Yang et al. 2024 (decay="channel", with its 1/16 in front of the log-decay).

    Args:
        dim: channels of x.
        num_heads: heads of the queries.
        num_key_heads: heads of the keys, default num_heads.
        num_value_heads: heads of the values, default num_key_heads. Each of the three divides
            the largest, H.
        key_dim: channels of a query and key head, default dim / num_heads.
        value_dim: channels of a value head, default dim / num_heads.
        causal: whether a token sees only itself and those before it.
        feature_map: a name of `linattn.feature_maps`.
        bias: the b of the affine kernel; its a is `scale`.
        scale: factor on phi(q) . phi(k). Default 1 where q and k are normalised or the map
            has its own ("taylor", "hedgehog"), else (number of features) ** -0.5.
        normalize: divide by the sum of the weights.
        qk_norm: "l2" gives q and k unit norm before the feature map, so that with the identity
            bias >= scale makes every weight >= 0; None leaves them.
        decay: None; "head", the constants 1 - 2^(-5 - h) of RetNet; "token" or "channel",
            logsigmoid(x W + b) / 16 for each head or each of its features.
        dropout: rate of the stand-in for dropout or of dropout, in training only.
        dropout_mode: "gaussian_output", the published noise on the output; "output", ordinary
            dropout there; or "qk", dropout of the elements of phi(q) and phi(k).
        projection_bias: whether the four projections have a bias.
        rope: base of the rotary position embedding in front of the rest; None: no positions.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range, or a combination that the operator has
            no definition for.
    """

    family: ClassVar[Family] = Family(
        "phi(x Wq)", "phi(x Wk)", "x Wv", "1, or fixed, or sigmoid(x Wa)^(1/16)", "1", "none"
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        num_value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool = True,
        feature_map: str = "identity",
        bias: float = 0.0,
        scale: float | None = None,
        normalize: bool = False,
        qk_norm: str | None = None,
        decay: str | None = None,
        dropout: float = 0.0,
        dropout_mode: str = "gaussian_output",
        projection_bias: bool = False,
        rope: float | None = None,
        backend: str = "auto",
    ):
        super().__init__()
        check.require_positive_int("dim", dim)
        check.require_positive_int("num_heads", num_heads)
        self.dim, self.num_heads = dim, num_heads
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        self.num_value_heads = self.num_key_heads if num_value_heads is None else num_value_heads
        self.heads = require_heads(
            {
                "num_heads": num_heads,
                "num_key_heads": self.num_key_heads,
                "num_value_heads": self.num_value_heads,
            }
        )
        self.key_dim = per_head("key_dim", key_dim, dim, num_heads)
        self.value_dim = per_head("value_dim", value_dim, dim, num_heads)
        require_choice("qk_norm", qk_norm, (None, "l2"))
        require_choice("decay", decay, (None, "head", "token", "channel"))
        require_choice("dropout_mode", dropout_mode, ("gaussian_output", "output", "qk"))
        require_dropout(dropout)
        check.require_number("bias", bias)
        require_choice("backend", backend, ("auto", *NAMES))
        flags = {"causal": causal, "normalize": normalize, "projection_bias": projection_bias}
        for name, flag in flags.items():
            check.require_bool(name, flag)
        if decay is not None and not causal:
            check.reject("decay", f"{decay!r} with causal=False", "None: every token sees all")
        if decay == "channel" and (bias != 0.0 or normalize):
            expected = "bias=0.0 and normalize=False with decay='channel'"
            name, got = ("bias", bias) if bias != 0.0 else ("normalize", normalize)
            check.reject(name, got, expected)
        require_rope(rope, self.key_dim)
        self.query_map, self.features = make_feature_map(feature_map, num_heads, self.key_dim)
        self.key_map, _ = make_feature_map(feature_map, self.num_key_heads, self.key_dim)
        if scale is None:
            own = qk_norm is not None or feature_map in ("normalised", "taylor", "hedgehog")
            scale = 1.0 if own else self.features**-0.5
        check.require_number("scale", scale)
        self.causal, self.feature_map, self.bias, self.scale = causal, feature_map, bias, scale
        self.normalize, self.qk_norm, self.decay = normalize, qk_norm, decay
        self.dropout, self.dropout_mode, self.backend = dropout, dropout_mode, backend
        self.rope = rope

        value_width = self.num_value_heads * self.value_dim
        self.q_proj = nn.Linear(dim, num_heads * self.key_dim, bias=projection_bias)
        self.k_proj = nn.Linear(dim, self.num_key_heads * self.key_dim, bias=projection_bias)
        self.v_proj = nn.Linear(dim, value_width, bias=projection_bias)
        self.o_proj = nn.Linear(self.heads * self.value_dim, dim, bias=projection_bias)
        self.decay_proj: nn.Linear | None = None
        if decay in ("token", "channel"):
            gates = self.heads * (self.features if decay == "channel" else 1)
            self.decay_proj = nn.Linear(dim, gates)
        self.head_log_decay: Tensor | None
        # Saved with the weights, so that a module made on "meta" and loaded has it too.
        self.register_buffer("head_log_decay", torch.empty(self.heads) if decay == "head" else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the constant decays of the heads, as in `Retention`."""
        if self.head_log_decay is not None:
            with torch.no_grad():
                self.head_log_decay.copy_(retention_log_decay(self.heads))

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: RecurrentCache | RetentionCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, RecurrentCache | RetentionCache]:
        """Mix the tokens of x.

        Args:
            x: [B, N, dim].
            mask: [B, N] bool, False: padding, on either side. Its output is the bias of o_proj,
                or 0.
            cu_seqlens: [S + 1] bounds of sequences packed in one row.
            cache: what an earlier call returned, for the tokens that follow it, one or many.
            return_cache: also return the cache after these tokens.

        Returns:
            y [B, N, dim], or (y, cache) with return_cache: a RecurrentCache, with rope a
            RetentionCache.
        """
        kind = RecurrentCache if self.rope is None else RetentionCache
        check_forward(x, self.dim, self.causal, cache, kind, return_cache, cu_seqlens)
        x = blank_padding(x, mask)
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.key_dim))  # [B, N, Hq, Dk]
        k = self.k_proj(x).unflatten(-1, (self.num_key_heads, self.key_dim))  # [B, N, Hk, Dk]
        v = self.v_proj(x).unflatten(-1, (self.num_value_heads, self.value_dim))  # [B, N, Hv, Dv]
        before = cache.seen if isinstance(cache, RetentionCache) else None
        if self.rope is not None:
            # A feature map or a decay a channel after it sees more than differences of positions.
            positions = positions_of(mask, x, before, cu_seqlens)
            q, k = rotary(q, positions, self.rope), rotary(k, positions, self.rope)
        if self.qk_norm == "l2":
            q, k = normalised(q), normalised(k)
        # Autocast takes some feature maps to float32; the operator wants one dtype.
        q, k = self.query_map(q).to(v.dtype), self.key_map(k).to(v.dtype)
        if self.dropout_mode == "qk":
            q, k = element_dropout(q, k, self.dropout, self.training)
        o, state = linear_attention(
            q,
            k,
            v,
            self._log_decay(x),
            causal=self.causal,
            scale=self.scale,
            bias=self.bias,
            normalize=self.normalize,
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        if self.dropout_mode == "gaussian_output":
            o = multiplicative_noise(o, self.dropout, self.training)
        elif self.dropout_mode == "output":
            o = nn.functional.dropout(o, self.dropout, self.training)
        y: Tensor = self.o_proj(o.flatten(-2))  # [B, N, dim]
        if not return_cache:
            return y
        if self.rope is None:
            return y, RecurrentCache(state)
        return y, RetentionCache(state, tokens_seen(mask, x, before))

    def _log_decay(self, x: Tensor) -> Tensor | None:
        if self.decay is None:
            return None
        if self.decay_proj is None:
            assert self.head_log_decay is not None
            # A module cast to 16 bits takes its buffers along; the operator reads float32 too.
            return self.head_log_decay.to(x.dtype) if x.dtype == torch.float64 else (
                self.head_log_decay.float()
            )  # fmt: skip
        logits = self.decay_proj(x)  # [B, N, H] or [B, N, H * features]
        logits = at_least_float32(logits)
        g = nn.functional.logsigmoid(logits) / 16
        return g.unflatten(-1, (self.heads, self.features)) if self.decay == "channel" else g

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        one = int(self.bias != 0.0 or self.normalize)
        return self.heads * (self.features + one) * (self.value_dim + one) + int(
            self.rope is not None
        )

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return (
            f"num_heads={self.num_heads}, num_key_heads={self.num_key_heads}, "
            f"num_value_heads={self.num_value_heads}, causal={self.causal}, "
            f"feature_map={self.feature_map!r}, bias={self.bias}, scale={self.scale:.4g}, "
            f"normalize={self.normalize}, qk_norm={self.qk_norm!r}, decay={self.decay!r}, "
            f"dropout={self.dropout}, rope={self.rope}"
        )
