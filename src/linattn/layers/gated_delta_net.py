"""Gated DeltaNet (Yang et al. 2024): the delta rule with a decay for every token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.feature_maps import normalised
from linattn.layers._arguments import blank_padding, check_forward, require_choice, require_heads
from linattn.layers.cache import ConvolutionCache
from linattn.layers.short_convolution import ShortConvolution
from linattn.ops import linear_attention


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: what the state holds for a key is replaced, and all of it decays.

        q, k, v = silu(conv(x [Wq, Wk, Wv]));  q, k of unit norm
        beta = sigmoid(x Wb);  alpha = exp(-exp(A_log) softplus(x Wa + dt_bias))    a head
        S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = S_t^T q_t / sqrt(Dk);  y = (rms_norm(o) * silu(x Wg)) Wo              norm over a head

    Source: Yang, Kautz and Hatamizadeh, *Gated Delta Networks* (ICLR 2025); the layer of
    Qwen3-Next. The paper's names, ours: alpha decay_proj, A_log and dt_bias, beta beta_proj,
    output gate g_proj.

    Parameters: with key width K = num_heads key_dim and value width V = Hv value_dim,
    dim (2 K + 3 V + 2 Hv) + (2 K + V) kernel_size + 2 Hv + value_dim.

    Args:
        dim: channels of x.
        num_heads: heads of queries and keys.
        num_value_heads: Hv, heads of values and gates, a multiple of num_heads; default num_heads.
        key_dim: channels of a query and key head (the paper: 256, with 6 heads).
        value_dim: channels of a value head, default 2 key_dim.
        kernel_size: taps of the convolution over q, k and v, 1 to 8.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_value_heads: int | None = None,
        key_dim: int = 256,
        value_dim: int | None = None,
        kernel_size: int = 4,
        backend: str = "auto",
    ):
        super().__init__()
        value_dim = 2 * key_dim if value_dim is None else value_dim
        for name, size in {"dim": dim, "key_dim": key_dim, "value_dim": value_dim}.items():
            check.require_positive_int(name, size)
        values = num_heads if num_value_heads is None else num_value_heads
        heads = require_heads({"num_heads": num_heads, "num_value_heads": values})
        if values != heads:
            expected = f"a multiple of num_heads = {num_heads}"
            check.reject("num_value_heads", num_value_heads, expected)
        require_choice("backend", backend, ("auto", *NAMES))
        self.dim, self.num_heads, self.num_value_heads, self.backend = (
            dim, num_heads, values, backend,
        )  # fmt: skip
        self.key_dim, self.value_dim = key_dim, value_dim
        self.widths = [num_heads * key_dim, num_heads * key_dim, values * value_dim]
        self.q_proj = nn.Linear(dim, self.widths[0], bias=False)
        self.k_proj = nn.Linear(dim, self.widths[1], bias=False)
        self.v_proj = nn.Linear(dim, self.widths[2], bias=False)
        self.convolution = ShortConvolution(sum(self.widths), kernel_size, backend=backend)
        self.beta_proj = nn.Linear(dim, values, bias=False)
        self.decay_proj = nn.Linear(dim, values, bias=False)
        self.A_log = nn.Parameter(torch.empty(values))
        self.dt_bias = nn.Parameter(torch.empty(values))
        self.g_proj = nn.Linear(dim, self.widths[2], bias=False)
        self.o_proj = nn.Linear(self.widths[2], dim, bias=False)
        self.norm = nn.RMSNorm(value_dim, eps=1e-6)
        self.reset_gates()

    @torch.no_grad()
    def reset_gates(self) -> None:
        """Draw A from U(0, 16) and softplus(dt_bias) log-uniform in 0.001 to 0.1 (as Mamba-2)."""
        self.A_log.uniform_(0.01, 16).log_()  # not 0, whose logarithm is no number
        dt = torch.empty_like(self.dt_bias).uniform_(-3, -1)
        dt = (10**dt).clamp(min=1e-4)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: ConvolutionCache | None = None,
        return_cache: bool = False,
    ) -> Tensor | tuple[Tensor, ConvolutionCache]:
        """Mix the tokens of x; arguments and result as in `LinearAttention.forward`."""
        check_forward(x, self.dim, True, cache, ConvolutionCache, return_cache, cu_seqlens)
        x = blank_padding(x, mask)
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        before = None if cache is None else cache.convolution
        mixed, window = self.convolution(mixed, mask, before, cu_seqlens)
        q, k, v = mixed.split(self.widths, dim=-1)
        q, k = (normalised(y.unflatten(-1, (self.num_heads, self.key_dim))) for y in (q, k))
        o, state = linear_attention(
            q,
            k,
            v.unflatten(-1, (self.num_value_heads, self.value_dim)),
            self._log_decay(x),
            self.beta_proj(x).sigmoid(),
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        gate = nn.functional.silu(self.g_proj(x))
        o = self.norm(o.to(self.norm.weight.dtype)).to(gate.dtype)  # under autocast in float32
        y: Tensor = self.o_proj(o.flatten(-2) * gate)  # [B, N, dim]
        return (y, ConvolutionCache(state, window)) if return_cache else y

    def _log_decay(self, x: Tensor) -> Tensor:
        # In float32 at least: 16 bits would round a decay near 1 to 1.
        dt = self.decay_proj(x)
        wide = torch.float64 if dt.dtype == torch.float64 else torch.float32
        dt, A_log, bias = dt.to(wide), self.A_log.to(wide), self.dt_bias.to(wide)
        return -A_log.exp() * nn.functional.softplus(dt + bias)  # [B, N, Hv]

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return state + self.convolution.state_size()

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return f"num_heads={self.num_heads}, num_value_heads={self.num_value_heads}"
