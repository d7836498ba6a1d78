"""Gated DeltaNet (Yang et al. 2024): the delta rule with a decay for every token."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn.layers.delta_net import DeltaNet, reset_softplus_decay, softplus_decay
from linattn.layers.family import Family


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet: DeltaNet with a decay of a head's whole state, and an output gate.

        q, k, v = silu(conv(x [Wq, Wk, Wv]));  q, k of unit norm
        beta = sigmoid(x Wb);  alpha = exp(-exp(A_log) softplus(x Wa + dt_bias))    a head
        S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = S_t^T q_t / sqrt(Dk);  y = (rms_norm(o) * silu(x Wg)) Wo              norm over a head

    Source: Yang, Kautz and Hatamizadeh, *Gated Delta Networks* (ICLR 2025); the layer of
    Qwen3-Next. The paper's names, ours: alpha decay_proj, A_log and dt_bias, beta beta_proj,
    output gate g_proj; the others as in `DeltaNet`.

    Parameters: with key width K = num_heads key_dim and value width V = Hv value_dim,
    dim (2 K + 3 V + 2 Hv) + (2 K + V) kernel_size + 2 Hv + value_dim.

    Args:
        dim: channels of x.
        num_heads: heads of queries and keys.
        num_value_heads: Hv, heads of values and gates, a multiple of num_heads; default num_heads.
        key_dim: channels of a query and key head (the paper: 256, with 6 heads).
        value_dim: channels of a value head, default 2 key_dim.
        kernel_size: taps of the convolution over q, k and v, 1 to 8.
        negative_eigenvalues: beta in (0, 2).
        backend: as in `linear_attention`.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    family: ClassVar[Family] = Family(
        "norm(silu(conv(x Wq)))",
        "norm(silu(conv(x Wk)))",
        "silu(conv(x Wv))",
        "exp(-A dt), a head",
        "silu(x Wg)",
        "delta",
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_value_heads: int | None = None,
        key_dim: int = 256,
        value_dim: int | None = None,
        kernel_size: int = 4,
        negative_eigenvalues: bool = False,
        backend: str = "auto",
    ):
        if value_dim is None and isinstance(key_dim, int):
            value_dim = 2 * key_dim
        super().__init__(
            dim, num_heads, num_value_heads=num_value_heads, key_dim=key_dim, value_dim=value_dim,
            kernel_size=kernel_size, output_gate=True, negative_eigenvalues=negative_eigenvalues,
            backend=backend,
        )  # fmt: skip
        self.decay_proj = nn.Linear(dim, self.num_value_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A from U(0.01, 16) and softplus(dt_bias) log-uniform in 0.001 to 0.1."""
        reset_softplus_decay(self.A_log, self.dt_bias, 0.01)  # not 0: it has no logarithm

    def log_decay(self, x: Tensor) -> Tensor:
        """Return the log-decay [B, N, Hv] of the tokens of x."""
        return softplus_decay(self.decay_proj(x), self.A_log, self.dt_bias)
