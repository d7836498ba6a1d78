"""DeltaNet (Schlag et al. 2021, Yang et al. 2024), and what its descendants share with it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn import _validation as check
from linattn._backends import NAMES
from linattn.feature_maps import normalised
from linattn.layers._arguments import blank_padding, check_forward, require_choice, require_heads
from linattn.layers.cache import ConvolutionCache
from linattn.layers.family import Family
from linattn.layers.short_convolution import ShortConvolution
from linattn.ops import linear_attention


class DeltaNet(nn.Module):
    """DeltaNet: what the state holds for a key is replaced by the value, as far as beta says.

        q, k, v = silu(conv(x [Wq, Wk, Wv]));  q, k of unit norm;  beta = sigmoid(x Wb)
        S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = S_t^T q_t / sqrt(Dk);  y = rms_norm(o) Wo                      norm over a head

    Source: Yang et al., *Parallelizing Linear Transformers with the Delta Rule* (NeurIPS 2024).
    The paper's names, ours: W_q q_proj, W_k k_proj, W_v v_proj, beta beta_proj, W_o o_proj.

    Parameters: with key width K = num_heads key_dim and value width V = Hv value_dim,
    dim (2 K + 2 V + Hv) + (2 K + V) kernel_size + value_dim; dim V more with an output gate.

    Args:
        dim: channels of x.
        num_heads: heads of queries and keys.
        num_value_heads: Hv, heads of values and of beta, a multiple of num_heads; default
            num_heads.
        key_dim: channels of a query and key head, default dim / num_heads.
        value_dim: channels of a value head, default key_dim.
        kernel_size: taps of the convolution over q, k and v, 1 to 8.
        output_gate: whether the output is multiplied by silu(x Wg).
        negative_eigenvalues: beta in (0, 2) and not (0, 1): I - beta k k^T may then reflect.
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "norm(silu(conv(x Wq)))",
        "norm(silu(conv(x Wk)))",
        "silu(conv(x Wv))",
        "1",
        "1, or silu(x Wg)",
        "delta",
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        kernel_size: int = 4,
        output_gate: bool = False,
        negative_eigenvalues: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        check.require_positive_int("dim", dim)
        values = num_heads if num_value_heads is None else num_value_heads
        heads = require_heads({"num_heads": num_heads, "num_value_heads": values})
        if values != heads:
            expected = f"a multiple of num_heads = {num_heads}"
            check.reject("num_value_heads", num_value_heads, expected)
        if key_dim is None and dim % num_heads != 0:
            check.reject("dim", dim, f"a multiple of num_heads = {num_heads}, or key_dim given")
        self.key_dim = dim // num_heads if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        check.require_positive_int("key_dim", self.key_dim)
        check.require_positive_int("value_dim", self.value_dim)
        for name, flag in {
            "output_gate": output_gate,
            "negative_eigenvalues": negative_eigenvalues,
        }.items():
            check.require_bool(name, flag)
        require_choice("backend", backend, ("auto", *NAMES))
        self.dim, self.num_heads, self.num_value_heads = dim, num_heads, values
        self.negative_eigenvalues, self.backend = negative_eigenvalues, backend
        width = values * self.value_dim
        self.widths = [num_heads * self.key_dim, num_heads * self.key_dim, width]
        self.q_proj = nn.Linear(dim, self.widths[0], bias=False)
        self.k_proj = nn.Linear(dim, self.widths[1], bias=False)
        self.v_proj = nn.Linear(dim, width, bias=False)
        self.convolution = ShortConvolution(sum(self.widths), kernel_size, backend=backend)
        self.beta_proj = nn.Linear(dim, values, bias=False)
        self.g_proj: nn.Module | None = nn.Linear(dim, width, bias=False) if output_gate else None
        self.o_proj = nn.Linear(width, dim, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-5)

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
        beta = self.beta_proj(x).sigmoid()  # [B, N, Hv]
        o, state = linear_attention(
            q,
            k,
            v.unflatten(-1, (self.num_value_heads, self.value_dim)),
            self.log_decay(x),
            2 * beta if self.negative_eigenvalues else beta,
            mask=mask,
            initial_state=None if cache is None else cache.state,
            return_state=True,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        o = self.norm(o.to(self.norm.weight.dtype)).flatten(-2)  # under autocast in float32
        gate = self.output_gate(x)
        y: Tensor = self.o_proj(o.to(x.dtype) if gate is None else o.to(gate.dtype) * gate)
        return (y, ConvolutionCache(state, window)) if return_cache else y

    def log_decay(self, x: Tensor) -> Tensor | None:
        """Return the log-decay of the tokens of x: none."""
        return None

    def output_gate(self, x: Tensor) -> Tensor | None:
        """Return what the output [B, N, Hv value_dim] is multiplied by, if anything."""
        return None if self.g_proj is None else nn.functional.silu(self.g_proj(x))

    def state_size(self) -> int:
        """Return how many numbers of state a batch row keeps, however long the sequence."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return state + self.convolution.state_size()

    def extra_repr(self) -> str:
        """Return the options that are not seen in the submodules."""
        return (
            f"num_heads={self.num_heads}, num_value_heads={self.num_value_heads}, "
            f"negative_eigenvalues={self.negative_eigenvalues}"
        )


def softplus_decay(logits: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return -exp(A_log) softplus(logits + dt_bias), the log-decay of Mamba-2 and after.

    In float32 at least: 16 bits would round a decay near 1 to 1.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    dt = nn.functional.softplus(logits.to(wide) + dt_bias.to(wide))
    return -A_log.to(wide).exp() * dt


@torch.no_grad()
def reset_softplus_decay(A_log: Tensor, dt_bias: Tensor, smallest: float) -> None:
    """Draw A from U(smallest, 16) and softplus(dt_bias) log-uniform in 0.001 to 0.1."""
    A_log.uniform_(smallest, 16).log_()
    dt = 10 ** torch.empty_like(dt_bias).uniform_(-3, -1)
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
