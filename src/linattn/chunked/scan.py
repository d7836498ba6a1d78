"""The only sequential part: the state, carried from chunk to chunk, and its gradient, backwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.chunked.layout import Segment


def scan_forward(
    segment: Segment,
    carry: Tensor | None,
    boundary: Tensor,
    update: Callable[[int, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk [chunks, R, Dk, Dv] and the one after the last.

    `carry` [R, Dk, Dv] comes from the segment before (None in the first), `update(c, S)` is the
    state after chunk c. `boundary` [sequences, H, Dk, Dv] holds initial states and is overwritten
    with final ones.
    """
    states: list[Tensor] = []
    for c in range(segment.chunks):
        start, stop = segment.first[c], segment.last[c]
        if start is not None:
            carry = boundary[start].flatten(0, 1).clone()  # [R, Dk, Dv]
        assert carry is not None
        states.append(carry)
        carry = update(c, carry)
        if stop is not None:
            boundary[stop] = carry.view_as(boundary[stop])
    assert carry is not None
    return torch.stack(states), carry


def scan_backward(
    segment: Segment,
    carry: Tensor | None,
    boundary: Tensor,
    update: Callable[[int, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The same from the last chunk to the first, for the gradient Z of the state.

    Returns the gradients of the states after each chunk [chunks, R, Dk, Dv] and that of the state
    before the first. `boundary` holds gradients of final states and is overwritten with those of
    the initial ones.
    """
    gradients: list[Tensor] = []
    for c in reversed(range(segment.chunks)):
        start, stop = segment.first[c], segment.last[c]
        if stop is not None:
            carry = boundary[stop].flatten(0, 1).clone()  # [R, Dk, Dv]
        assert carry is not None
        gradients.append(carry)
        carry = update(c, carry)
        if start is not None:
            boundary[start] = carry.view_as(boundary[start])
    assert carry is not None
    return torch.stack(gradients[::-1]), carry
