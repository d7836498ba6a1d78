"""The host's side of the two passes that every family shares: find the states, read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from linattn.triton.layout import WIDE, Chunks, block, strided
from linattn.triton.outputs import outputs_kernel
from linattn.triton.states import added_kernel, scan_kernel

SCAN_BLOCK = 256  # numbers of a state a program carries: 64 x 64 in 16 programs a head


@dataclass
class Side:
    """Queries, keys or values [B, N, H, D], with their last coordinate in the affine kernel."""

    x: Tensor
    one: Tensor  # [B, N, H] float32
    scale: float = 1.0  # of x, not of the coordinate

    @property
    def width(self) -> int:
        """D."""
        return self.x.shape[3]


def empty(chunks: Chunks, *shape: int) -> Tensor:
    """Return room in float32 on the call's device."""
    return torch.empty(shape, dtype=torch.float32, device=chunks.table.device)


def add(
    chunks: Chunks, x: Side, y: Side, total: Tensor, *, g: Tensor | None = None,
    affine: bool = False, from_start: bool = False,
) -> Tensor:  # fmt: skip
    """Return what each chunk adds to the state [chunks, H, D (+ 1), DV (+ 1)]: sum of x y^T.

    With a log-decay g of one number a token also write the totals.
    """
    added = empty(chunks, chunks.count, chunks.H, x.width + affine, y.width + affine)
    bx, by = block(x.width, chunks.dtype), block(y.width, chunks.dtype)
    tiles_y = triton.cdiv(y.width, by)
    grid = (chunks.count, chunks.H, triton.cdiv(x.width, bx) * tiles_y)
    if chunks.count > 0:
        added_kernel[grid](
            strided(x.x), strided(x.one), strided(y.x), strided(y.one), chunks.decay(g),
            out=added, total=total, scale=x.scale, X_GROUP=chunks.group(x.x),
            Y_GROUP=chunks.group(y.x), DX=x.width, DY=y.width, TILES_Y=tiles_y, BX=bx, BY=by,
            AFFINE=affine, DECAY=g is not None, FROM_START=from_start, **chunks.common(),
        )  # fmt: skip
    return added


def scan(
    chunks: Chunks, added: Tensor, total: Tensor | None, initial: Tensor | None, *,
    reverse: bool = False,
) -> Tensor:  # fmt: skip
    """Turn what chunks add into the states before them (`reverse`: after); return the last one.

    total [chunks, H, 1 or rows]; None: nothing decays.
    """
    _, H, rows, columns = added.shape
    sequences = len(chunks.first) - 1
    final = empty(chunks, sequences, H, rows, columns)
    if final.numel() > 0:
        scan_kernel[(sequences, H, triton.cdiv(rows * columns, SCAN_BLOCK))](
            added, final if total is None else total, final if initial is None else initial,
            final, chunks.first, H, rows * columns, columns,
            1 if total is None else total.shape[2], BLOCK=SCAN_BLOCK, DECAY=total is not None,
            REVERSED=reverse, INITIAL=initial is not None,
        )  # fmt: skip
    return final


def read(
    chunks: Chunks, q: Side, v: Side, states: Tensor, to: Tensor, *, k: Side | None = None,
    pairs: Tensor | None = None, g: Tensor | None = None, affine: bool = False,
    reverse: bool = False, transposed: bool = False, scale: float = 1.0,
    sums: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write scale times what q reads to `to` [B, N, H, DV] and return it; outputs.py has the sum.

    states: one a chunk, or one a sequence [sequences, H, ...]. k: keys in the chunk, weighed with
    the decay g; pairs: the weights themselves. sums [B, N, H] receives those of the weights, by
    which is divided.
    """
    keys = q if k is None else k
    rows, columns = states.shape[2:]
    bv = block(v.width, chunks.dtype)
    if chunks.count == 0:
        return to
    outputs_kernel[(chunks.count, chunks.H, triton.cdiv(v.width, bv))](
        strided(q.x), strided(q.one), strided(keys.x), strided(keys.one), strided(v.x),
        strided(v.one), chunks.decay(g), states if pairs is None else pairs, states=states,
        o=strided(to), sums=strided(q.one if sums is None else sums), scale_q=q.scale,
        scale_k=keys.scale, scale_v=v.scale, scale_o=scale, Q_GROUP=chunks.group(q.x),
        K_GROUP=chunks.group(keys.x), V_GROUP=chunks.group(v.x), D=q.width, DV=v.width,
        STATE_SIZE=rows * columns, STEP_ROW=1 if transposed else columns,
        STEP_COLUMN=columns if transposed else 1, BD=block(q.width, chunks.dtype), BV=bv,
        AFFINE=affine, NORMALIZE=sums is not None, DECAY=g is not None, REVERSED=reverse,
        BY_CHUNK=states.shape[0] == chunks.count and chunks.causal,
        PAIRS=2 if pairs is not None else int(k is not None),
        num_warps=WIDE if affine else 4, **chunks.common(),
    )  # fmt: skip
    return to
