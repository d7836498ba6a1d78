"""Lightning attention (Qin et al. 2024): linear attention with a fixed decay for every head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.layers._arguments import blank_padding, check_forward, per_head, require_choice
from linattn.layers.cache import RecurrentCache
from linattn.layers.family import Family
from linattn.ops import linear_attention


class LightningAttention(nn.Module):
    """Lightning attention of TransNormerLLM and MiniMax-01: no scale, no norm of the weights.

        q, k, v = silu(x Wq), silu(x Wk), silu(x Wv)
        S_t = exp(-s_h) S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t                     head h
        y   = (rms_norm(o) * sigmoid(x Wg)) Wo                                   norm over all heads

    Source: Qin et al., *Lightning Attention-2* (2024); the layer of MiniMax-01. The paper's names,
    ours: decay lambda exp(-slope), W_u g_proj; the others alike.

    Parameters: 5 dim V + V, with V = num_heads head_dim. The slopes are constants.

    Args:
        dim: channels of x.
        num_heads: H.
        head_dim: channels of a head, default dim / num_heads.
        slopes: "linear", s_h = 8 h / H for h = 0 .. H - 1 (TransNormerLLM), or "geometric",
            s_h = 2^(-8 (h + 1) / H) (MiniMax-01).
        depth: layer / layers in [0, 1]: slopes are (1 - depth) times these, so that deep layers
            see farther.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "silu(x Wq)", "silu(x Wk)", "silu(x Wv)", "exp(-s_h), fixed", "sigmoid(x Wg)", "fixed"
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        slopes: str = "linear",
        depth: float = 0.0,
        backend: str = "auto",
    ):
        super().__init__()
        check.require_positive_int("dim", dim)
        check.require_positive_int("num_heads", num_heads)
        self.head_dim = per_head("head_dim", head_dim, dim, num_heads)
        require_choice("slopes", slopes, ("linear", "geometric"))
        check.require_number("depth", depth)
        if not 0 <= depth <= 1:
            check.reject("depth", depth, "a number in [0, 1]")
        require_choice("backend", backend, ("auto", *NAMES))
        self.dim, self.num_heads, self.backend = dim, num_heads, backend
        width = num_heads * self.head_dim
        self.q_proj = nn.Linear(dim, width, bias=False)
        self.k_proj = nn.Linear(dim, width, bias=False)
        self.v_proj = nn.Linear(dim, width, bias=False)
        self.g_proj = nn.Linear(dim, width, bias=False)
        self.o_proj = nn.Linear(width, dim, bias=False)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.slopes, self.depth = slopes, depth
        self.slope: Tensor
        # Saved with the weights, so that a module made on "meta" and loaded has it too.
        self.register_buffer("slope", torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the slopes."""
        H = self.num_heads
        head = torch.arange(H, dtype=torch.float64) * 8 / H
        slope = head if self.slopes == "linear" else 2 ** (-head - 8 / H)
        with torch.no_grad():
            self.slope.copy_(slope * (1 - self.depth))

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
        q, k, v = (
            nn.functional.silu(proj(x)).unflatten(-1, (self.num_heads, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        # A module cast to 16 bits takes its buffers along; the operator reads float32 too.
        slope = self.slope if v.dtype == torch.float64 else self.slope.float()
        o, state = linear_attention(
            q,
            k,
            v,
            -slope,
            scale=1.0,
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        gate = self.g_proj(x).sigmoid()
        o = self.norm(o.flatten(-2).to(self.norm.weight.dtype)).to(gate.dtype)
        y: Tensor = self.o_proj(o * gate)  # [B, N, dim]
        return (y, RecurrentCache(state)) if return_cache else y

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        return self.num_heads * self.head_dim**2

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return f"num_heads={self.num_heads}"
