"""Whether models are accelerated: a mark on each of their layers, and one for all models."""

from __future__ import annotations

import threading
from typing import Any

MARK = "_linattn_accelerated"  # the attribute of a layer


class _Era:
    number = 0  # `decelerate()` begins a new one, in which no older mark counts
    lock = threading.Lock()  # on marks, which several threads change


era = _Era()


class Mark:
    """What says that a layer runs on this library: until taken back, or inside of with statements.

    Attributes:
        lasting: by `accelerate`.
        opened: how many `with accelerated(model)` it is in.
        modules: the modeling modules whose stand-ins look at it.
    """

    def __init__(self, modules: tuple[str, ...] = (), *, lasting: bool = False):
        self.born, self.lasting, self.opened, self.modules = era.number, lasting, 0, modules

    def is_on(self) -> bool:
        """Return whether it counts."""
        return self.born == era.number and (self.lasting or self.opened > 0)

    def is_lasting(self) -> bool:
        """Return whether it counts beyond with statements."""
        return self.born == era.number and self.lasting

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        """Return the mark of a copy, which is in no with statement."""
        copy = Mark(self.modules, lasting=self.lasting)
        copy.born = self.born
        return copy


class _Everywhere:
    mark = Mark()  # of all models


everywhere = _Everywhere()


def is_marked(module: Any) -> bool:
    """Return whether a layer, or all models, run on this library.

    By getattr: torch.compile guards what that finds, also where there is nothing yet.
    """
    mark = getattr(module, MARK, None)
    return (mark is not None and mark.is_on()) or everywhere.mark.is_on()


def mark_of(module: Any, modules: tuple[str, ...]) -> Mark:
    """Return the mark of a layer in this era, a new one where it has none."""
    mark: Mark | None = module.__dict__.get(MARK)
    if mark is None or mark.born != era.number:
        mark = module.__dict__[MARK] = Mark(modules)
    return mark


def mark_of_all() -> Mark:
    """Return the mark of all models in this era."""
    if everywhere.mark.born != era.number:
        everywhere.mark = Mark()
    return everywhere.mark
