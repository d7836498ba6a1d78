"""The host's side of pairs.py: the weights in the chunks written out, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from linattn.triton.layout import WIDE, Chunks, block, gathered, strided
from linattn.triton.pairs import factors_kernel, scores_kernel
from linattn.triton.pairs_backward import (
    channel_backward_kernel,
    crossed_pairs_kernel,
    token_backward_kernel,
)
from linattn.triton.passes import empty


def kind_of(g: Tensor | None) -> int:
    """Return the kernels' DECAY: 0 none, 1 one a token (or head), 2 one a channel."""
    return 0 if g is None else 2 if g.dim() == 4 else 1


class Factors:
    """q exp(L_i), k exp(L_i), k exp(L_C - L_j) [B, N, H, Dk] and exp(L_C) [chunks, H, 1 or Dk]."""

    def __init__(self, chunks: Chunks, q: Tensor, k: Tensor, g: Tensor | None, *, read_k: bool):
        self.read_q, self.read_k, self.write_k = q, k, k
        self.total: Tensor | None = None
        if g is None:
            return
        kind, Dk = kind_of(g), chunks.Dk
        shape = (chunks.B, chunks.N, chunks.H, Dk)
        self.read_q, self.write_k = q.new_empty(shape), k.new_empty(shape)
        self.read_k = k.new_empty(shape) if read_k else k
        rows = Dk if kind == 2 else 1
        self.total = empty(chunks, chunks.count, chunks.H, rows)
        bd = block(Dk, chunks.dtype)
        if chunks.count > 0:
            factors_kernel[(chunks.count, chunks.H, triton.cdiv(Dk, bd))](
                strided(q), strided(k), chunks.decay(g), read_q=strided(self.read_q),
                read_k=strided(self.read_k), write_k=strided(self.write_k), total=self.total,
                Q_GROUP=chunks.group(q), K_GROUP=chunks.group(k), D=Dk, TOTAL_ROWS=rows, BD=bd,
                CHANNELS=kind == 2, READ_K=read_k, **chunks.common(),
            )  # fmt: skip


def scores(
    chunks: Chunks, x: Tensor, y: Tensor, g: Tensor | None, *, scale: float = 1.0,
    strict: bool = False, beta: Tensor | None = None, system: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return scale x . y with the decay, [chunks, H, C, C], below the diagonal and on it.

    strict: not on it. beta [B, N, H]: write Diag(beta) times that to system.
    """
    found = empty(chunks, chunks.count, chunks.H, chunks.size, chunks.size)
    if chunks.count > 0:
        scores_kernel[(chunks.count, chunks.H)](
            strided(x), strided(y), chunks.decay(g),
            chunks.decay(None) if beta is None else strided(beta), scores=found,
            system=found if system is None else system, scale=scale, BETA=beta is not None,
            X_GROUP=chunks.group(x), Y_GROUP=chunks.group(y), D=x.shape[3],
            BD=block(x.shape[3], chunks.dtype), DECAY=kind_of(g), STRICT=strict,
            num_warps=WIDE if kind_of(g) == 2 else 4, **chunks.common(),
        )  # fmt: skip
    return found


def gradients(
    chunks: Chunks, q: Tensor, k: Tensor, g: Tensor | None, scale: float,
    qk: tuple[Tensor, Tensor], kk: tuple[Tensor, Tensor] | None,
    d_read_q: Tensor, d_read_k: Tensor | None, d_write_k: Tensor, S: Tensor, Z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and g (empty for None).

    qk, kk: the scores of (scale q, k) and of (k, k), if any, each with its gradient.
    """
    kind = kind_of(g)
    if kind == 2:
        assert g is not None
        return _channel_gradients(
            chunks, q, k, g, scale, qk[1], None if kk is None else kk[1], d_read_q, d_read_k,
            d_write_k, S, Z,
        )  # fmt: skip
    bd, has_keys = block(chunks.Dk, chunks.dtype), kk is not None
    tiles = triton.cdiv(chunks.Dk, bd)
    dq, dk = chunks.gradient_room(q), chunks.gradient_room(k)
    dg = empty(chunks, chunks.B, chunks.N, chunks.H, kind * (tiles + 1))
    keys, d_keys = qk if kk is None else kk
    common = chunks.common()
    if chunks.count > 0:
        token_backward_kernel[(chunks.count, chunks.H, tiles)](
            strided(q), strided(k), chunks.decay(g), d_scores=qk[1], d_keys=d_keys,
            d_read_q=strided(d_read_q),
            d_read_k=strided(d_read_q if d_read_k is None else d_read_k),
            d_write_k=strided(d_write_k), S=S, Z=Z, dq=strided(dq), dk=strided(dk),
            dg=strided(dg), scale=scale, Q_GROUP=chunks.group(q), K_GROUP=chunks.group(k),
            D=chunks.Dk, DV=chunks.Dv, BD=bd, BV=block(chunks.Dv, chunks.dtype),
            DECAY=kind == 1, KEYS=has_keys, num_warps=WIDE, **common,
        )  # fmt: skip
    if g is None:
        return gathered(dq, q), gathered(dk, k), dg.new_empty(0)
    if chunks.count > 0:
        crossed_pairs_kernel[(chunks.count, chunks.H)](
            common["mask"], chunks.table, qk[0], qk[1], keys, d_keys, strided(dg[..., tiles]),
            chunks.H, C=chunks.size, KEYS=has_keys, MASKED=common["MASKED"],
        )  # fmt: skip
    dg = dg.sum(3) if g.dim() == 3 else dg.sum((0, 1, 3), dtype=torch.float64)
    return gathered(dq, q), gathered(dk, k), dg.to(g.dtype)


def _channel_gradients(
    chunks: Chunks, q: Tensor, k: Tensor, g: Tensor, scale: float, d_scores: Tensor,
    d_keys: Tensor | None, d_read_q: Tensor, d_read_k: Tensor | None, d_write_k: Tensor,
    S: Tensor, Z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and g for one decay a channel."""
    dq = chunks.gradient_room(q)
    dk = chunks.gradient_room(k) if d_keys is None else chunks.head_room(k)
    dg = chunks.head_room(k)
    # Ten tiles [64, BD] are in use at once; 32 would spill twice as much.
    grid = (chunks.count, chunks.H, triton.cdiv(chunks.Dk, 16))
    options: dict[str, Any] = {
        "dq": strided(dq), "dk": strided(dk), "dg": strided(dg), "K_GROUP": chunks.group(k),
        "D": chunks.Dk, "DV": chunks.Dv, "BD": 16, "BV": block(chunks.Dv, chunks.dtype),
        "num_warps": WIDE, **chunks.common(),
    }  # fmt: skip
    write = strided(d_write_k)
    if chunks.count > 0:
        channel_backward_kernel[grid](
            strided(q), strided(k), chunks.decay(g), d_scores=d_scores, d_read=strided(d_read_q),
            d_write=write, S=S, Z=Z, scale=scale, Q_GROUP=chunks.group(q), KEYS=False, **options,
        )  # fmt: skip
        if d_keys is not None and d_read_k is not None:
            channel_backward_kernel[grid](
                strided(k), strided(k), chunks.decay(g), d_scores=d_keys,
                d_read=strided(d_read_k), d_write=write, S=S, Z=Z, scale=1.0,
                Q_GROUP=chunks.group(k), KEYS=True, **options,
            )  # fmt: skip
    return gathered(dq, q), gathered(dk, k).to(k.dtype), dg.to(g.dtype)
