"""Where the stand-ins of `calls.py` go in transformers' modeling modules, and how they come out."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn

from linattn.integrations import calls
from linattn.integrations import transformers as adapters

# Names in transformers' modeling modules that have an adapter of the same name.
ADAPTED = (
    "causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule", "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention", "mamba2_chunk_scan", "mamba2_selective_state_update",
    "mamba_selective_scan", "mamba_selective_state_update",
)  # fmt: skip
# Functions of transformers around those.
AROUND = ("causal_conv1d_forward", "mamba_scan_forward", "mamba2_scan_forward")
# Layers whose forward as a whole has an adapter.
WHOLE = {"MiniMaxLightningAttention": "minimax_lightning_attention"}
# Those that are left alone, and why.
LEFT = {
    "mamba2_split_conv1d_scan_combined": "returns None without its package: the parts run",
    "mamba_inner_fn": "returns None without its package: the parts run",
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


def _put(owner: Any, name: str, make: Callable[..., Any], *arguments: Any) -> None:
    """Put the stand-in that `make` gives for an attribute in its place, once."""
    found = getattr(owner, name)
    if calls.original(found) is None:
        setattr(owner, name, make(found, *arguments))


def _place(module: ModuleType, name: str) -> tuple[Any, str]:
    """Return where the function that a modeling module has under this name is replaced.

    The `kernels` package makes it a torch module of a class of its own, one in the file and one in
    each layer, which it finds by its name.
    """
    found = getattr(module, name)
    return (type(found), "forward") if isinstance(found, nn.Module) else (module, name)


def patch(module: ModuleType, report: Report) -> None:
    """Put the stand-ins in a modeling module."""
    short = module.__name__.rsplit(".", 1)[-1].removeprefix("modeling_")
    for name in ADAPTED:
        if hasattr(module, name):
            owner, attribute = _place(module, name)
            adapter, bound = getattr(adapters, name), int(attribute == "forward")
            _put(owner, attribute, calls.function, name, adapter, bound)
            report.changed.setdefault(short, []).append(name)
    for name, adapter_name in WHOLE.items():
        if hasattr(module, name):
            adapter = getattr(adapters, adapter_name)
            _put(getattr(module, name), "forward", calls.whole_forward, adapter)
            report.changed.setdefault(short, []).append(name)
    for name, why in LEFT.items():
        if hasattr(module, name):
            report.left[f"{short}.{name}"] = why
    if short not in report.changed:
        return
    for kind in _own_classes(module):
        if _calls_adapted(kind):
            _put(kind, "forward", calls.layer_forward)
        elif _is_model(kind) and "forward" in vars(kind):
            _put(kind, "forward", calls.model_forward)


def _own_classes(module: ModuleType) -> list[type]:
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    ]


def _is_model(kind: type) -> bool:
    from transformers import PreTrainedModel

    return issubclass(kind, PreTrainedModel)


def _calls_adapted(kind: type) -> bool:
    """Return whether a method of a module class names a function of ADAPTED or AROUND."""
    if not issubclass(kind, nn.Module) or "forward" not in vars(kind):
        return False
    methods = (inspect.unwrap(f) for f in vars(kind).values() if inspect.isfunction(f))
    named = {name for method in methods for name in method.__code__.co_names}
    return not named.isdisjoint((*ADAPTED, *AROUND))


def unpatch(module: ModuleType) -> None:
    """Put a modeling module's own functions and forwards back."""
    places = [_place(module, name) for name in ADAPTED if hasattr(module, name)]
    places += [(kind, "forward") for kind in _own_classes(module)]
    for owner, name in places:
        own = calls.original(vars(owner).get(name))
        if own is not None:
            setattr(owner, name, own)


def families() -> list[str]:
    """Return the families of the installed transformers that call a function of ADAPTED or LEFT.

    By their modeling files' text, without importing them.
    """
    import transformers.models as models

    known = [*(f"def {name}(" for name in (*ADAPTED, *LEFT)), *(f"class {name}(" for name in WHOLE)]
    found = []
    for info in pkgutil.iter_modules(models.__path__):
        for root in models.__path__:
            path = f"{root}/{info.name}/modeling_{info.name}.py"
            with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
                text = file.read()
                if any(name in text for name in known):
                    found.append(info.name)
    return sorted(found)
