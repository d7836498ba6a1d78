"""Derivatives that a fast backend lacks, refused by name: forward mode, and second ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch = torch._C._functorch


def refuse_tangents(function: str, remedy: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError if a tensor carries a tangent; `remedy` completes the message.

    While torch.compile traces, tangents cannot be seen: any torch.func.jvp around is refused.
    """
    if torch.compiler.is_compiling():
        found = _is_inside_jvp()
    elif forward_ad._current_level < 0:
        return
    else:
        found = _any_has_tangent([x for x in tensors if x is not None])
    if found:
        raise NotImplementedError(
            f"{function}: forward-mode derivatives are not implemented here; {remedy}"
        )


def no_second_derivative(function: str) -> Callable[..., NoReturn]:
    """Return what stands for the derivative of a backward operator: an error that says so."""

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(
            f"{function}: second derivatives are not implemented by this backend; "
            'use backend="reference", whose derivatives are exact to any order; of a model under '
            "linattn.accelerate, linattn.decelerate"
        )

    return refuse


def _any_has_tangent(tensors: list[Tensor]) -> bool:
    """Look at every level of torch.func transforms, the innermost first."""
    level = _functorch.maybe_current_level()
    if level is None:
        return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    below = []
    for x in tensors:
        if _functorch.is_functorch_wrapped_tensor(x) and _functorch.maybe_get_level(x) == level:
            differentiated = _functorch.is_gradtrackingtensor(x)
            if differentiated and forward_ad.unpack_dual(x).tangent is not None:
                return True
            x = _functorch.get_unwrapped(x)
        below.append(x)
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    with temporarily_pop_interpreter_stack():
        return _any_has_tangent(below)


def _is_inside_jvp() -> bool:
    stack = _functorch.get_interpreter_stack()
    return stack is not None and any(x.key() == _functorch.TransformType.Jvp for x in stack)


# Called when a graph is traced, and not traced itself.
_is_inside_jvp._dynamo_marked_constant = True  # type: ignore[attr-defined]
