"""The switch: transformers' models on this library's operators, on and off again.

The functions that the models call are attributes of their modeling modules. Something stands in
their place that asks, at every call, whether a layer of an accelerated model is running in this
thread (also again in the backward pass, under gradient checkpointing), or all models are.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from linattn._validation import reject
from linattn.integrations import transformers as adapters

TESTED = ("5.24", "5.25")  # from, below
# Names in transformers' modeling modules that have an adapter of the same name.
ADAPTED = (
    "causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention", "mamba2_chunk_scan", "mamba2_selective_state_update",
)  # fmt: skip
# Those that are left alone, and why.
LEFT = {
    "mamba2_split_conv1d_scan_combined": "returns None without its package: the parts run",
    "mamba_inner_fn": "returns None without its package: the parts run",
    "mamba_selective_scan": "no kernel of Mamba-1's scan yet",
    "mamba_selective_state_update": "no kernel of Mamba-1's scan yet",
}


@dataclass
class Report:
    """What a switch has changed.

    Attributes:
        changed: function names by module.
        left: reasons by "module.function".
    """

    changed: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{module}: {', '.join(names)}" for module, names in self.changed.items()]
        return "\n".join([*lines, *(f"{name} left: {why}" for name, why in self.left.items())])


_everywhere = False
_hooks: weakref.WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = (
    weakref.WeakKeyDictionary()
)  # of accelerated models
_inside = threading.local()  # how many layers of an accelerated model this thread is in


def active() -> bool:
    """Return whether a call now runs on this library."""
    return _everywhere or getattr(_inside, "depth", 0) > 0


def _dispatcher(original: Callable[..., Any], adapter: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in a module in place of its function."""

    def _dispatch(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if active() and all(x.device.type == "cpu" for x in tensors):
            return adapter(*args, **kwargs)
        return original(*args, **kwargs)

    _dispatch.__wrapped__ = original  # type: ignore[attr-defined]
    _dispatch.__name__ = getattr(original, "__name__", adapter.__name__)
    return _dispatch


def _is_dispatcher(found: object) -> bool:
    return getattr(found, "__qualname__", "").startswith("_dispatcher.")


def _patch(module: ModuleType, report: Report) -> None:
    """Put dispatchers in a modeling module, once."""
    short = module.__name__.rsplit(".", 1)[-1].removeprefix("modeling_")
    for name in ADAPTED:
        found = getattr(module, name, None)
        if found is None:
            continue
        if _is_dispatcher(found):
            report.changed.setdefault(short, []).append(name)
            continue
        setattr(module, name, _dispatcher(found, getattr(adapters, name)))
        report.changed.setdefault(short, []).append(name)
    for name, why in LEFT.items():
        if hasattr(module, name):
            report.left[f"{short}.{name}"] = why


def families() -> list[str]:
    """Return the families of the installed transformers that call a function of ADAPTED or LEFT.

    By their modeling files' text, without importing them.
    """
    import transformers.models as models

    found = []
    for info in pkgutil.iter_modules(models.__path__):
        for root in models.__path__:
            path = f"{root}/{info.name}/modeling_{info.name}.py"
            with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
                text = file.read()
                if any(f"def {name}(" in text for name in (*ADAPTED, *LEFT)):
                    found.append(info.name)
    return sorted(found)


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
    if not isinstance(model, nn.Module):
        reject("model", type(model).__name__, "a model of transformers", kind=TypeError)
    _check_version()
    report = Report()
    modules = {
        type(part).__module__
        for part in model.modules()
        if type(part).__module__.startswith("transformers.models.")
    }
    for name in sorted(modules):
        _patch(sys.modules[name], report)
    if not report.changed:
        report.left[type(model).__name__] = "it calls nothing that has an adapter"
    if model not in _hooks:
        _hooks[model] = tuple(
            handle
            for part in model.modules()
            if _calls_adapted(type(part))
            for handle in (
                part.register_forward_pre_hook(_enter, prepend=True),
                part.register_forward_hook(_leave, always_call=True),
            )
        )
    return report


def _calls_adapted(kind: type) -> bool:
    """Return whether a method of a module class names a function of ADAPTED."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    methods = (inspect.unwrap(f) for f in vars(kind).values() if inspect.isfunction(f))
    return any(name in ADAPTED for method in methods for name in method.__code__.co_names)


def _enter(module: nn.Module, inputs: Any) -> None:
    _inside.depth = getattr(_inside, "depth", 0) + 1


def _leave(module: nn.Module, inputs: Any, output: Any) -> None:
    _inside.depth = max(0, getattr(_inside, "depth", 0) - 1)


def decelerate(model: nn.Module | None = None) -> None:
    """Undo `accelerate(model)`; with None undo all, and put transformers' own functions back."""
    global _everywhere
    if model is not None:
        for handle in _hooks.pop(model, ()):
            handle.remove()
        return
    _everywhere = False
    for known in list(_hooks):
        decelerate(known)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and module is not None:
            for function in ADAPTED:
                found = getattr(module, function, None)
                if _is_dispatcher(found):
                    setattr(module, function, found.__wrapped__)  # type: ignore[union-attr]


def accelerate_transformers() -> Report:
    """Have every model of transformers run on this library's operators, those made later too.

    Imports the modeling files of all families that have something to change. `decelerate()` puts
    all back.
    """
    global _everywhere
    _check_version()
    report = Report()
    for name in families():
        _patch(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), report)
    _everywhere = True
    return report


@contextlib.contextmanager
def accelerated(model: nn.Module | None = None) -> Iterator[Report]:
    """Accelerate a model, or all with None, inside of a with statement; put it back after."""
    global _everywhere
    if model is None:
        before = _everywhere
        report = accelerate_transformers()
        try:
            yield report
        finally:
            _everywhere = before
        return
    was = model in _hooks
    report = accelerate(model)
    try:
        yield report
    finally:
        if not was:
            decelerate(model)
