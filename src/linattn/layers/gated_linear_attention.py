"""Gated linear attention, GLA (Yang et al. 2023): a decay for every channel of the key."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.layers._arguments import at_least_float32, blank_padding, check_forward, require_choice
from linattn.layers.cache import RecurrentCache
from linattn.layers.family import Family
from linattn.ops import linear_attention


class GatedLinearAttention(nn.Module):
    """GLA: linear attention with a decay a channel, projected through a low rank.

        q, k, v = x Wq, x Wk, x Wv;  alpha = sigmoid(x W1 W2 + b)^(1/16)
        S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t / sqrt(Dk)     a head
        y   = (rms_norm(o) * silu(x Wr)) Wo                                     norm over a head

    Source: Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training*
    (ICML 2024). The paper's names, ours: W_Q q_proj, W_K k_proj, W_V v_proj, W_alpha^1 and
    W_alpha^2 decay_proj, W_r g_proj, W_O o_proj, tau 16.

    Parameters: with key width K = num_heads key_dim and value width V = num_heads value_dim,
    dim (2 K + 3 V) + gate_rank (dim + K) + K + value_dim; with the defaults 4 dim^2 and a little.

    Args:
        dim: channels of x.
        num_heads: H.
        key_dim: channels of a query and key head, default dim / (2 H).
        value_dim: channels of a value head, default dim / H.
        gate_rank: columns of W1.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "x Wq", "x Wk", "x Wv", "sigmoid(x W1 W2 + b)^(1/16), a channel", "silu(x Wr)", "dynamic"
    )

    def __init__(
        self,
        dim: int,
        num_heads: int = 4,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        gate_rank: int = 16,
        backend: str = "auto",
    ):
        super().__init__()
        sizes = {"dim": dim, "num_heads": num_heads, "gate_rank": gate_rank}
        for name, size in sizes.items():
            check.require_positive_int(name, size)
        if (key_dim is None or value_dim is None) and dim % (2 * num_heads) != 0:
            expected = (
                f"a multiple of 2 num_heads = {2 * num_heads}, or key_dim and value_dim given"
            )
            check.reject("dim", dim, expected)
        self.key_dim = dim // (2 * num_heads) if key_dim is None else key_dim
        self.value_dim = dim // num_heads if value_dim is None else value_dim
        check.require_positive_int("key_dim", self.key_dim)
        check.require_positive_int("value_dim", self.value_dim)
        require_choice("backend", backend, ("auto", *NAMES))
        self.dim, self.num_heads, self.backend = dim, num_heads, backend
        keys, values = num_heads * self.key_dim, num_heads * self.value_dim
        self.q_proj = nn.Linear(dim, keys, bias=False)
        self.k_proj = nn.Linear(dim, keys, bias=False)
        self.v_proj = nn.Linear(dim, values, bias=False)
        self.decay_proj = nn.Sequential(
            nn.Linear(dim, gate_rank, bias=False), nn.Linear(gate_rank, keys)
        )
        self.g_proj = nn.Linear(dim, values, bias=False)
        self.o_proj = nn.Linear(values, dim, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-5)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: RecurrentCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, RecurrentCache]:
        """Mix the tokens of x; arguments and result as in `LinearAttention.forward`."""
        check_forward(x, self.dim, True, cache, RecurrentCache, return_cache, cu_seqlens)
        x = blank_padding(x, mask)
        logits = at_least_float32(self.decay_proj(x))
        o, state = linear_attention(
            self._heads(self.q_proj(x)),
            self._heads(self.k_proj(x)),
            self._heads(self.v_proj(x)),
            self._heads(nn.functional.logsigmoid(logits) / 16),
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        gate = nn.functional.silu(self.g_proj(x))
        o = self.norm(o.to(self.norm.weight.dtype)).to(gate.dtype)  # under autocast in float32
        y: Tensor = self.o_proj(o.flatten(-2) * gate)  # [B, N, dim]
        return (y, RecurrentCache(state)) if return_cache else y

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))  # [B, N, H, D]

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        return self.num_heads * self.key_dim * self.value_dim

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return f"num_heads={self.num_heads}"
