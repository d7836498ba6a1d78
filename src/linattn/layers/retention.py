"""Retention, the mixer of RetNet (Sun et al. 2023): fixed decays and rotary positions."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.layers._arguments import blank_padding, check_forward, per_head, require_choice
from linattn.layers.cache import RetentionCache
from linattn.layers.family import Family
from linattn.layers.rotary import positions_of, require_rope, rotary, tokens_seen
from linattn.ops import linear_attention


class Retention(nn.Module):
    """Multi-scale retention: every head forgets at its own fixed rate.

        q, k = rotary(x Wq), rotary(x Wk);  v = x Wv;  gamma_h = 1 - 2^(-5 - h)
        S_t = gamma_h S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t / sqrt(Dk)            head h
        y   = (rms_norm(o) * silu(x Wg)) Wo                                     norm over a head

    Source: Sun et al., *Retentive Network* (2023). The paper's names, ours: W_Q q_proj, W_K k_proj,
    W_V v_proj, W_G g_proj, W_O o_proj, e^(i n theta) `rotary`; its group norm is an RMS norm here,
    as in its released code.

    Parameters: with K = num_heads key_dim and V = num_heads value_dim, dim (2 K + 3 V) + value_dim;
    8 dim^2 + 2 dim / num_heads with the defaults. gamma is constant.

    Args:
        dim: channels of x.
        num_heads: H.
        key_dim: channels of a query and key head, even, default dim / H.
        value_dim: channels of a value head, default 2 dim / H.
        rope: base of the rotary wavelengths; None: no positions.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "rotary(x Wq)", "rotary(x Wk)", "x Wv", "1 - 2^(-5 - h), fixed", "silu(x Wg)", "fixed"
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        rope: float | None = 10000.0,
        backend: str = "auto",
    ):
        super().__init__()
        check.require_positive_int("dim", dim)
        check.require_positive_int("num_heads", num_heads)
        self.key_dim = per_head("key_dim", key_dim, dim, num_heads)
        self.value_dim = per_head("value_dim", value_dim, 2 * dim, num_heads)
        require_rope(rope, self.key_dim)
        require_choice("backend", backend, ("auto", *NAMES))
        self.dim, self.num_heads, self.rope, self.backend = dim, num_heads, rope, backend
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, values, bias=False)
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.o_proj = nn.Linear(values, dim, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-5)
        self.log_decay: Tensor
        # Saved with the weights, so that a module made on "meta" and loaded has it too.
        self.register_buffer("log_decay", torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set log gamma."""
        with torch.no_grad():
            self.log_decay.copy_(retention_log_decay(self.num_heads))

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: RetentionCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, RetentionCache]:
        """Mix the tokens of x; arguments and result as in `LinearAttention.forward`."""
        check_forward(x, self.dim, True, cache, RetentionCache, return_cache, cu_seqlens)
        x = blank_padding(x, mask)
        q, k = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
        if self.rope is not None:
            # Differences of positions are all that counts: packed sequences need no restart.
            positions = positions_of(mask, x, None if cache is None else cache.seen)
            q, k = rotary(q, positions, self.rope), rotary(k, positions, self.rope)
        v = self._heads(self.v_proj(x))
        # A module cast to 16 bits takes its buffers along; the operator reads float32 too.
        log_decay = self.log_decay if v.dtype == torch.float64 else self.log_decay.float()
        o, state = linear_attention(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            log_decay,
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        gate = nn.functional.silu(self.g_proj(x))
        o = self.norm(o.to(self.norm.weight.dtype)).to(gate.dtype)  # under autocast in float32
        y: Tensor = self.o_proj(o.flatten(-2) * gate)  # [B, N, dim]
        if not return_cache:
            return y
        return y, RetentionCache(state, tokens_seen(mask, x, None if cache is None else cache.seen))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))  # [B, N, H, D]

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        return self.num_heads * self.key_dim * self.value_dim + 1

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return f"num_heads={self.num_heads}, rope={self.rope}"


def retention_log_decay(num_heads: int) -> Tensor:
    """Return log(1 - 2^(-5 - h)) for h = 0 .. num_heads - 1, [H] float64."""
    constants = [math.log1p(-(2.0 ** (-5 - h))) for h in range(num_heads)]
    return torch.tensor(constants, dtype=torch.float64)
