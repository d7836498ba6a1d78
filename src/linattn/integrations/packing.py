"""Packed rows in transformers' models: where their sequences begin, and whether all say the same.

Bounds (`cu_seq_lens_q`, `seq_idx`) keep states apart, and positions that start again attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linattn._validation import is_readable, reject

BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
MIXING = ("glm5_next", "granitemoehybrid")  # families whose attention is not told of positions


def check_packing(module: str, given: dict[str, Any]) -> bool:
    """Return whether the arguments of a model say that a row is packed; raise where it fails."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    told = {name: given[name] for name in BOUNDS if given.get(name) is not None}
    if not told:
        if _restarts(positions, mask):
            reject(
                "position_ids", "a row of positions that start again",
                "cu_seq_lens_q beside it (return_flash_attn_kwargs of DataCollatorWithFlattening), "
                "or one sequence a row: no state is kept apart by positions",
            )  # fmt: skip
        return False
    family = module.rsplit(".", 2)[-2]
    if family in MIXING:
        expected = f"one sequence a row: softmax attention of {family} mixes packed ones"
        reject("cu_seq_lens_q", "packed sequences", expected)
    own = _of_text(positions)
    if own is None:
        got = f"shape {list(positions.shape)}" if isinstance(positions, Tensor) else positions
        expected = "[1, N], from 0 on in every packed sequence, by which attention keeps them apart"
        reject("position_ids", got, expected)
    if mask is not None:
        expected = "None: with a mask attention does not keep packed sequences apart"
        reject("attention_mask", "a mask with packed sequences", expected)
    _check_agreement(own, told)
    return True


def _of_text(positions: Any) -> Tensor | None:
    """Return the positions [B, N] by which attention keeps sequences apart; None: there are none.

    Qwen3.5 takes [4, B, N], of which those are the first, and [3, B, N], which has none.
    """
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() == 3 and positions.shape[0] == 4:
        return positions[0]
    return positions if positions.dim() == 2 else None


def _restarts(positions: Any, mask: Any) -> bool:
    """Return whether the positions of one row start again, and not behind padding on the left."""
    if not isinstance(positions, Tensor) or positions.dim() not in (2, 3):
        return False
    rows = positions if positions.dim() == 2 else positions[0]  # time, in [3, B, N]
    if rows.shape[0] != 1 or not is_readable(rows):  # traced: it has no values to look at
        return False
    if isinstance(mask, Tensor) and not bool(mask.all()):
        return False
    return bool((rows.diff() < 0).any())


def _check_agreement(positions: Tensor, told: dict[str, Tensor]) -> None:
    """Raise where bounds and positions [1, N] begin sequences at different tokens."""
    if not all(is_readable(x) for x in (positions, *told.values())):
        return
    starts = {"position_ids": (positions[0].diff() != 1).nonzero()[:, 0] + 1}
    for name, x in told.items():
        if name == "seq_idx":
            starts[name] = (x[0].diff() != 0).nonzero()[:, 0] + 1
        else:
            starts[name] = x[(x > 0) & (x < positions.shape[1])].unique()
    by_positions = starts.pop("position_ids").tolist()
    for name, found in starts.items():
        if found.tolist() != by_positions:
            reject(
                name, f"packed sequences that begin at {[0, *found.tolist()]}",
                f"the same as position_ids, which begin again at {[0, *by_positions]}",
            )  # fmt: skip
