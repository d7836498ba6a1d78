"""Examples of a task: tokens, and what a model shall say at some of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn._validation import reject, require_positive_int, require_seed

UNSCORED = -100  # the label of a position that is not asked


class Examples(NamedTuple):
    """Sequences with an answer at some positions.

    Attributes:
        tokens: [n, N] int64.
        labels: [n, N] int64, the token to be said at that position (not moved by one); UNSCORED
            where nothing is asked.
    """

    tokens: Tensor
    labels: Tensor


class Classes(NamedTuple):
    """Sequences, pairs of them or images, with one class each.

    Attributes:
        inputs: [n, N] or [n, 2, N] int64 tokens; or [n, channels, height, width] images.
        labels: [n] int64.
        lengths: [n] or [n, 2] int64: tokens that are no padding; None: all.
    """

    inputs: Tensor
    labels: Tensor
    lengths: Tensor | None = None


def generator(seed: int, split: str) -> torch.Generator:
    """Return random numbers for a split, "train", "validation" or "test": never those of another.

    Raises:
        ValueError: another split, or a seed that is not in 0 .. 2**40.
    """
    splits = ("train", "validation", "test")
    if split not in splits:
        reject("split", repr(split), f"one of {splits}")
    require_seed(seed)
    return torch.Generator().manual_seed(3 * seed + splits.index(split))


def draw(choices: int, number: int, rows: int, random: torch.Generator) -> Tensor:
    """Return [rows, number] of range(choices), in each row without replacement."""
    return weighted_draw(torch.ones(choices), number, rows, random)


def weighted_draw(weights: Tensor, number: int, rows: int, random: torch.Generator) -> Tensor:
    """Return [rows, number] indices, one after another by weight, in each row none twice.

    weights: [choices], all > 0.
    """
    if number > weights.numel():
        reject("number", number, f"at most {weights.numel()}, what there is to draw from")
    at_once = max(1, 2**24 // weights.numel())  # rows: 64 MiB
    parts = [
        torch.multinomial(weights.expand(min(at_once, rows - i), -1), number, generator=random)
        for i in range(0, rows, at_once)
    ]
    return torch.cat(parts) if parts and number > 0 else torch.zeros(rows, number, dtype=torch.long)


def require_sizes(sizes: dict[str, int]) -> None:
    """Raise unless every size, by the name of its argument, is an int >= 1."""
    for name, value in sizes.items():
        require_positive_int(name, value)


def accuracy(predicted: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the mean over examples of the share of right answers, and the share all right.

    predicted, labels: [n, N]; examples without a label do not count.

    Raises:
        ValueError: no label at all.
    """
    asked = labels != UNSCORED
    counted = asked.any(1)
    if not bool(counted.any()):
        reject("labels", "no position that is asked", "at least one")
    right = ((predicted == labels) & asked).sum(1)[counted]
    of = asked.sum(1)[counted]
    return float((right / of).mean()), float((right == of).float().mean())
