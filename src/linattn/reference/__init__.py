"""The definition: START HERE. Token loops that read like the equations, in plain torch.

Glossary (one batch row, one head)

| symbol  | argument  | shape    | meaning                               | unit | paper |
|---------|-----------|----------|---------------------------------------|------|-------|
| q_t     | q         | [Dk]     | query: what token t reads             | -    | [1]   |
| k_t     | k         | [Dk]     | key: where token t writes             | -    | [1]   |
| v_t     | v         | [Dv]     | value: what token t writes            | -    | [1]   |
| g_t     | log_decay | 1 or [Dk] | log of the share of the state kept    | nats | [2,3] |
| alpha_t | exp(g_t)  | 1 or [Dk] | the share kept, in [0, 1]             | -    | [3]   |
| beta_t  | beta      | 1        | write strength of the delta rule      | -    | [4]   |
| S_t     | state     | [Dk, Dv] | the memory after token t              | -    | [1]   |
| o_t     | o         | [Dv]     | what token t has read                 | -    | [1]   |
| a       | scale     | 1        | slope of the kernel a*x + b           | -    | [5]   |
| b       | bias      | 1        | offset of the kernel a*x + b          | -    | [5]   |
| N, B, H | -         | -        | tokens, batch rows, heads             | -    | -     |

[1] Katharopoulos et al. 2020, Transformers are RNNs; [2] Sun et al. 2023, RetNet; [3] Chou et al.
2024, MetaLA; [4] Yang et al. 2024, (Gated) DeltaNet; [5] Towards Making Linear Attention Usable.

`additive.py` is the recurrence without beta and the affine kernel; `delta.py` the one with beta.
Gradients come from autograd, which stores a Dk x Dv state for every token: O(N * Dk * Dv) memory.
That is the form the fast backends exist to replace, and the one they are held against.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from linattn._validation import sequence_bounds, state_dtype, without_autocast
from linattn.reference import additive, delta


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    bias: float,
    normalize: bool,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return o [B, N, H, Dv] in q's dtype and the final state; arguments as `linear_attention`."""
    dtype, sums = q.dtype, state_dtype(q.dtype)
    with without_autocast(q):
        H = max(q.shape[2], k.shape[2], v.shape[2])
        q, k, v = (_repeat_heads(x.to(sums), H) for x in (q, k, v))
        log_decay = _per_token(log_decay, q)
        beta = None if beta is None else beta.to(sums)
        present = q.new_ones(q.shape[:2], dtype=torch.bool) if mask is None else mask
        # A masked token is not there. Its values may be anything, NaN included, so they are
        # replaced before they meet any arithmetic: q, k, v, g, beta = 0 changes nothing.
        q, k, v = (torch.where(_trailing(present, x), x, 0) for x in (q, k, v))
        log_decay, beta = (
            None if x is None else torch.where(_trailing(present, x), x, 0)
            for x in (log_decay, beta)
        )
        sequences = _split(q, k, v, log_decay, beta, present, cu_seqlens)
        outputs, states = [], []
        for i, (q_, k_, v_, g_, beta_, present_) in enumerate(sequences):
            S = initial_state
            if S is not None and cu_seqlens is not None:
                S = S[i : i + 1]  # [1, H, Dk, Dv]
            if beta_ is not None:
                o, S = delta.token_loop(q_, k_, v_, g_, beta_, S, scale=scale)
            elif bias != 0.0 or normalize:
                o, S = additive.affine(
                    q_, k_, v_, g_, present_, S,
                    scale=scale, bias=bias, normalize=normalize, causal=causal,
                )  # fmt: skip
            elif causal:
                o, S = additive.token_loop(q_, k_, v_, g_, S, scale=scale)
            else:
                o, S = additive.every_token_sees_all(q_, k_, v_, S, scale=scale)
            outputs.append(o)
            states.append(S)
        o = torch.cat(outputs, dim=1)
        o = torch.where(_trailing(present, o), o, 0)  # whatever the state holds
    return o.to(dtype), torch.cat(states, dim=0)


def _repeat_heads(x: Tensor, H: int) -> Tensor:
    """Give head h the group h // (H / Hx): block order, as grouped-query attention has it."""
    return x.repeat_interleave(H // x.shape[2], dim=2)


def _per_token(log_decay: Tensor | None, q: Tensor) -> Tensor | None:
    """Write a per-head decay [H] out as [B, N, H]; leave the others."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(q.dtype)
    return log_decay.expand(q.shape[:3]) if log_decay.dim() == 1 else log_decay


def _trailing(present: Tensor, x: Tensor) -> Tensor:
    return present.reshape(*present.shape, *[1] * (x.dim() - 2))


def _split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    present: Tensor,
    cu_seqlens: Tensor | None,
) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]]:
    """Cut packed sequences apart: tokens of one never meet those of another."""
    if cu_seqlens is None:
        return [(q, k, v, log_decay, beta, present)]
    bounds = sequence_bounds(cu_seqlens, q.shape[1])
    return [
        (
            q[:, i:j],
            k[:, i:j],
            v[:, i:j],
            None if log_decay is None else log_decay[:, i:j],
            None if beta is None else beta[:, i:j],
            present[:, i:j],
        )
        for i, j in pairwise(bounds)
    ]
