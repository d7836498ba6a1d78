"""What stands in place of transformers' functions and forwards while models are accelerated.

The functions that the models call are attributes of their modeling modules, and what they are not
told - that a model is accelerated, that its row is packed - is known to the forwards around them.
Each stand-in keeps the original in `_replaces`, and is it for every model that is not accelerated.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from linattn._validation import reject
from linattn.integrations.marks import everywhere, is_marked
from linattn.integrations.packing import BOUNDS, check_packing

CACHES = ("cache", "past_key_values", "cache_params")  # names of a cache among arguments


class _Inside(threading.local):
    depth = 0  # how many layers of an accelerated model this thread is in
    packed = False  # whether the model was told of packed sequences


_inside = _Inside()


def active() -> bool:
    """Return whether a call now runs on this library."""
    return everywhere.mark.is_on() or _inside.depth > 0


def original(found: object) -> Any:
    """Return what a stand-in replaces; None: it is no stand-in."""
    return getattr(found, "_replaces", None)


def _stands_for(replaced: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def finish(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(stand_in, replaced)
        stand_in._replaces = replaced  # type: ignore[attr-defined]
        return stand_in

    return finish


def _check_bounds(name: str, told: dict[str, Any]) -> None:
    """Raise where a model was told of packed sequences, and what it calls is not."""
    if _inside.packed and all(told.get(bound) is None for bound in BOUNDS):
        reject(
            "cu_seq_lens_q", "packed sequences",
            f"one sequence a row: this model does not tell {name} where packed ones begin",
        )  # fmt: skip


def _check_cache(told: dict[str, Any]) -> None:
    if _inside.packed and any(told.get(name) is not None for name in CACHES):
        expected = "use_cache=False: attention behind a cache does not keep packed ones apart"
        reject("use_cache", "a cache with packed sequences", expected)


def function(
    replaced: Callable[..., Any], name: str, adapter: Callable[..., Any], bound: int
) -> Callable[..., Any]:
    """Return the stand-in for a function of a modeling module, behind `bound` arguments of self."""

    @_stands_for(replaced)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not active() or any(x.device.type != "cpu" for x in tensors):
            return replaced(*args, **kwargs)
        _check_bounds(name, kwargs)
        return adapter(*args[bound:], **kwargs)

    return dispatch


def layer_forward(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for the forward of a layer that calls such functions."""

    @_stands_for(replaced)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_marked(self):
            return replaced(self, *args, **kwargs)
        _check_cache(kwargs)
        _inside.depth += 1
        try:
            return replaced(self, *args, **kwargs)
        finally:
            _inside.depth -= 1

    return forward


def whole_forward(replaced: Callable[..., Any], adapter: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for a layer's forward that an adapter replaces as a whole."""

    @_stands_for(replaced)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_marked(self) or hidden_states.device.type != "cpu":
            return replaced(self, hidden_states, *args, **kwargs)
        _check_cache(kwargs)
        _check_bounds(type(self).__name__, kwargs)
        return adapter(self, hidden_states, *args, **kwargs)

    return forward


def model_forward(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for the forward of a whole model, which knows whether a row is packed."""
    signature = inspect.signature(replaced)

    @_stands_for(replaced)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_marked(self) or _inside.packed:
            return replaced(self, *args, **kwargs)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        _inside.packed = check_packing(type(self).__module__, given)
        try:
            return replaced(self, *args, **kwargs)
        finally:
            _inside.packed = False

    return forward
