"""Mamba-2 (Dao and Gu 2024): the state space model whose decay is one number a head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.layers._arguments import blank_padding, check_forward, require_choice, require_heads
from linattn.layers.cache import ConvolutionCache
from linattn.layers.delta_net import reset_softplus_decay, softplus_decay
from linattn.layers.family import Family
from linattn.layers.short_convolution import ShortConvolution
from linattn.ops import linear_attention


class Mamba2(nn.Module):
    """Mamba-2: linear attention with q = C, k = B, v = dt x, and a decay for every token.

        z, u, dt = x W_in;  v, B, C = silu(conv(u) + b);  dt = softplus(dt + dt_bias)     a head
        S_t = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t v_t)^T;  o_t = S_t^T C_t + D v_t
        y   = rms_norm(o * silu(z)) W_out                        norm over the heads of one B and C

    Source: Dao and Gu, *Transformers are SSMs* (ICML 2024). The paper's names, ours: N key_dim,
    P value_dim, groups of B and C num_key_heads; in_proj, A_log, dt_bias, D, norm, out_proj alike.

    Parameters: with V = num_heads value_dim, U = V + 2 num_key_heads key_dim,
    dim (2 V + U + num_heads) + U (kernel_size + 1) + 3 num_heads + V.

    Args:
        dim: channels of x.
        num_heads: H (the paper: 2 dim / 64).
        key_dim: N, numbers of state a channel.
        value_dim: P, channels of a head.
        num_key_heads: groups that share B and C, a divisor of num_heads.
        kernel_size: taps of the convolution, 1 to 8.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "C = silu(conv(x Wc))",
        "B = silu(conv(x Wb))",
        "dt silu(conv(x Wx))",
        "exp(-A dt), a head",
        "silu(x Wz)",
        "dynamic",
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        key_dim: int = 128,
        value_dim: int = 64,
        num_key_heads: int = 1,
        kernel_size: int = 4,
        backend: str = "auto",
    ):
        super().__init__()
        for name, size in {"dim": dim, "key_dim": key_dim, "value_dim": value_dim}.items():
            check.require_positive_int(name, size)
        largest = require_heads({"num_heads": num_heads, "num_key_heads": num_key_heads})
        if num_heads != largest:
            check.reject("num_key_heads", num_key_heads, f"a divisor of num_heads = {num_heads}")
        require_choice("backend", backend, ("auto", *NAMES))
        self.dim, self.num_heads, self.num_key_heads = dim, num_heads, num_key_heads
        self.key_dim, self.value_dim, self.backend = key_dim, value_dim, backend
        values, keys = num_heads * value_dim, num_key_heads * key_dim
        self.widths = [values, keys, keys]
        self.in_proj = nn.Linear(dim, values + sum(self.widths) + num_heads, bias=False)
        self.convolution = ShortConvolution(
            sum(self.widths), kernel_size, bias=True, backend=backend
        )
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.norm = nn.RMSNorm(values // num_key_heads, eps=1e-5, elementwise_affine=False)
        self.norm_weight = nn.Parameter(torch.empty(values))
        self.out_proj = nn.Linear(values, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A from U(1, 16) and dt log-uniform in 0.001 to 0.1; D and the norm are 1."""
        reset_softplus_decay(self.A_log, self.dt_bias, 1.0)
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm_weight)

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
        projected = self.in_proj(blank_padding(x, mask))
        z, u, logits = projected.split([self.widths[0], sum(self.widths), self.num_heads], dim=-1)
        before = None if cache is None else cache.convolution
        u, window = self.convolution(u, mask, before, cu_seqlens)
        v, k, q = u.split(self.widths, dim=-1)
        v = v.unflatten(-1, (self.num_heads, self.value_dim))  # [B, N, H, P]
        k, q = (y.unflatten(-1, (self.num_key_heads, self.key_dim)) for y in (k, q))
        # dt in float32 at least: it makes the decay, which 16 bits would round to 1.
        log_decay = softplus_decay(logits, self.A_log, self.dt_bias)  # [B, N, H]
        dt = nn.functional.softplus(logits.to(log_decay.dtype) + self.dt_bias.to(log_decay.dtype))
        o, state = linear_attention(
            q,
            k,
            (v * dt[..., None]).to(v.dtype),
            log_decay,
            scale=1.0,
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        o = (o + v * self.D[:, None].to(v.dtype)).flatten(-2) * nn.functional.silu(z)
        groups = o.to(self.norm_weight.dtype).unflatten(-1, (self.num_key_heads, -1))
        o = self.norm(groups).flatten(-2) * self.norm_weight
        y: Tensor = self.out_proj(o.to(z.dtype))  # [B, N, dim]
        y = blank_padding(y, mask)  # D v is not 0 where a token is padding
        return (y, ConvolutionCache(state, window)) if return_cache else y

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        return self.num_heads * self.key_dim * self.value_dim + self.convolution.state_size()

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return f"num_heads={self.num_heads}, num_key_heads={self.num_key_heads}"
