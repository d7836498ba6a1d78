"""The delta rule, token by token: decay first, then erase, then write.

    S'  = Diag(exp(g_t)) S_{t-1}
    S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
    o_t = scale * S_t^T q_t

What S' returns for k_t is replaced, by the share beta_t, with v_t. The order is that of Gated
DeltaNet and Kimi Delta Attention; for one decay a head it equals erasing first. Shapes as in
`additive.py`; beta [B, N, H].
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.reference.additive import decay_state, zero_state


def token_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    S: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return o [B, N, H, Dv] and the state after the last token."""
    S = zero_state(q, v) if S is None else S
    o = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            S = decay_state(S, log_decay[:, t])
        recalled = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        written = beta[:, t, :, None] * (v[:, t] - recalled)  # [B, H, Dv]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        o.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(o, dim=1) if o else v, S  # no token: v is an empty o
