"""Kimi delta attention, KDA (Kimi Team 2025): the delta rule with a decay for every channel."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn._validation import require_positive_int
from linattn.layers.delta_net import DeltaNet, reset_softplus_decay, softplus_decay
from linattn.layers.family import Family


class KimiDeltaAttention(DeltaNet):
    """KDA: Gated DeltaNet with a decay for every channel of the key.

        q, k, v = silu(conv(x [Wq, Wk, Wv]));  q, k of unit norm;  beta = sigmoid(x Wb)
        alpha = exp(-exp(A_log) softplus(x F1 F2 + dt_bias))                     a channel
        S' = diag(alpha_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
        o_t = S_t^T q_t / sqrt(Dk);  y = (rms_norm(o) * sigmoid(x G1 G2 + b)) Wo  norm over a head

    Source: Kimi Team, *Kimi Linear* (2025). The paper's names, ours: alpha decay_proj (F1, F2),
    A_log (one a head) and dt_bias, output gate g_proj (G1, G2); the others as in `DeltaNet`.

    Parameters: with width W = num_heads head_dim, 4 dim W + (dim + W) 2 head_dim
    + dim num_heads + 3 W kernel_size + 2 W + num_heads + head_dim.

    Args:
        dim: channels of x.
        num_heads: H.
        head_dim: channels of a query, key and value head, and rank of both low-rank gates (the
            paper: 128, with 16 heads).
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
        "exp(-A dt), a channel",
        "sigmoid(x G1 G2 + b)",
        "delta",
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int = 128,
        kernel_size: int = 4,
        negative_eigenvalues: bool = False,
        backend: str = "auto",
    ):
        require_positive_int("head_dim", head_dim)
        super().__init__(
            dim, num_heads, key_dim=head_dim, value_dim=head_dim, kernel_size=kernel_size,
            negative_eigenvalues=negative_eigenvalues, backend=backend,
        )  # fmt: skip
        width = num_heads * head_dim
        self.decay_proj = nn.Sequential(
            nn.Linear(dim, head_dim, bias=False), nn.Linear(head_dim, width, bias=False)
        )
        self.g_proj = nn.Sequential(
            nn.Linear(dim, head_dim, bias=False), nn.Linear(head_dim, width)
        )
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A from U(1, 16) and softplus(dt_bias) log-uniform in 0.001 to 0.1."""
        reset_softplus_decay(self.A_log, self.dt_bias, 1.0)

    def log_decay(self, x: Tensor) -> Tensor:
        """Return the log-decay [B, N, H, head_dim] of the tokens of x."""
        logits = self.decay_proj(x).unflatten(-1, (self.num_heads, self.key_dim))
        return softplus_decay(logits, self.A_log[:, None], self.dt_bias)

    def output_gate(self, x: Tensor) -> Tensor:
        """Return what the output [B, N, H head_dim] is multiplied by."""
        assert self.g_proj is not None
        gate: Tensor = self.g_proj(x)
        return gate.sigmoid()
