"""The switch: transformers' models on this library's operators, on and off again.

Where an adapter exists, a stand-in (`calls.py`) takes the place of transformers' function or
forward, once for all models; a mark on the modules of an accelerated model tells it what to do.
transformers' own way to register kernels loads them from a hub, and to use one of them on a model
takes back all others: it does not serve here.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from linattn._validation import reject
from linattn.integrations import calls
from linattn.integrations.marks import MARK, Mark, era, mark_of, mark_of_all
from linattn.integrations.patches import Report, families, patch, unpatch

TESTED = ("5.24", "5.26")  # from, below


def _check_version() -> None:
    import transformers

    version = tuple(int(x) for x in transformers.__version__.split(".")[:2])
    low, below = (tuple(int(x) for x in text.split(".")) for text in TESTED)
    if not low <= version < below:
        warnings.warn(
            f"transformers {transformers.__version__} is outside the tested range: from "
            f"{TESTED[0]}, below {TESTED[1]}",
            stacklevel=3,
        )


def accelerate(model: nn.Module) -> Report:
    """Have a model of transformers run on this library's operators on a CPU.

    The same results to rounding; on another device its own code runs. Calling it again changes
    nothing more. `decelerate(model)` puts all back.

    Args:
        model: any model of transformers; parts that have no adapter are left alone.

    Returns:
        What was changed, and what was left alone and why.

    Raises:
        TypeError: no torch module.
    """
    report, parts = _patch_model(model)
    with era.lock:
        for part in parts:
            mark_of(part, _modeling(part)).lasting = True
    return report


def _require_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        got = model.__name__ if isinstance(model, type) else type(model).__name__
        reject("model", got, "a model of transformers", kind=TypeError)


def _patch_model(model: nn.Module) -> tuple[Report, list[nn.Module]]:
    """Put stand-ins where the parts of a model need them; return the parts that have one."""
    _require_model(model)
    _check_version()
    report = Report()
    for name in sorted({name for part in model.modules() for name in _modeling(part)}):
        patch(sys.modules[name], report)
    if not report.changed:
        report.left[type(model).__name__] = "it calls nothing that has an adapter"
    parts = []
    for name, part in model.named_modules():
        forwards = [vars(kind)["forward"] for kind in type(part).__mro__ if "forward" in vars(kind)]
        if all(calls.original(forward) is None for forward in forwards):
            continue
        if "forward" in part.__dict__:
            report.left[name or type(part).__name__] = "its forward is not its class's own"
        elif calls.original(forwards[0]) is None:
            why = "its class has another forward: only what that calls of transformers' is changed"
            report.left[name or type(part).__name__] = why
        parts.append(part)
    return report, parts


def _modeling(part: nn.Module) -> tuple[str, ...]:
    """Return the modeling modules of transformers that a layer's class and its bases are from."""
    names = dict.fromkeys(kind.__module__ for kind in type(part).__mro__)
    return tuple(name for name in names if name.startswith("transformers.models."))


def _unpickled(lasting: bool, modules: tuple[str, ...]) -> Mark | None:
    """Return the mark of a layer that comes from a pickle, in this process or another."""
    if not lasting:
        return None
    for name in modules:
        patch(importlib.import_module(name), Report())
    return Mark(modules, lasting=True)


def _reduced(mark: Mark) -> tuple[Any, ...]:
    return _unpickled, (mark.is_lasting(), mark.modules)


copyreg.pickle(Mark, _reduced)


def decelerate(model: nn.Module | None = None) -> None:
    """Undo `accelerate(model)`; with None undo all, and put transformers' own functions back.

    It ends with statements too, whose own ends then change nothing.

    Raises:
        TypeError: no torch module.
    """
    if model is not None:
        _require_model(model)
        for part in model.modules():
            part.__dict__.pop(MARK, None)
        return
    with era.lock:
        era.number += 1
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and module is not None:
            unpatch(module)


def accelerate_transformers() -> Report:
    """Have every model of transformers run on this library's operators, those made later too.

    Imports the modeling files of all families that have something to change. `decelerate()` puts
    all back.
    """
    report = _patch_all()
    with era.lock:
        mark_of_all().lasting = True
    return report


def _patch_all() -> Report:
    _check_version()
    report = Report()
    for name in families():
        patch(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), report)
    return report


@contextlib.contextmanager
def accelerated(model: nn.Module | None = None) -> Iterator[Report]:
    """Accelerate a model, or all with None, inside of a with statement; put it back after.

    Several threads may be in one for the same model: it is accelerated until the last has left.
    """
    if model is None:
        report, parts = _patch_all(), list[nn.Module]()
    else:
        report, parts = _patch_model(model)
    with era.lock:
        marks = [mark_of(part, _modeling(part)) for part in parts]
        marks += [mark_of_all()] if model is None else []
        for mark in marks:
            mark.opened += 1
    try:
        yield report
    finally:
        with era.lock:
            for mark in marks:
                mark.opened -= 1
            for part in parts:
                found = part.__dict__.get(MARK)
                if found is not None and not found.is_on():
                    del part.__dict__[MARK]
