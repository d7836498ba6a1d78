"""The torch.library operators of `selective_scan`: schemas, fakes and autograd. No numerics."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from linattn._tangents import no_second_derivative, refuse_tangents
from linattn._validation import launching, state_dtype
from linattn._vmap import one_call_each

_library = torch.library.Library("linattn", "FRAGMENT")

BACKENDS = ("chunked", "cpu")
_ARGUMENTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor b, Tensor c, Tensor? skip, Tensor? z, Tensor? dt_bias, "
    "bool softplus, Tensor? mask, Tensor? initial_state, Tensor? cu_seqlens"
)
_GRADIENTS = (
    "Tensor dx, Tensor ddt, Tensor dA, Tensor db, Tensor dc, Tensor dskip, Tensor dz, "
    "Tensor ddt_bias, Tensor dinitial_state"
)


def forward(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, mask: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a checked call on a fast backend; return o and the final state."""
    given = (x, dt, A, b, c, skip, z, dt_bias, initial_state)
    refuse_tangents("selective_scan", 'use backend="reference"', *given)
    operator = getattr(torch.ops.linattn, f"{backend}_selective_scan")
    o, state = operator(x, dt, A, b, c, skip, z, dt_bias, softplus, mask, initial_state, cu_seqlens)
    return o, state


def _fake(x: Tensor, dt: Tensor, A: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens = rest[-1]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = x.new_empty((sequences, *A.shape), dtype=state_dtype(x.dtype))
    return x.new_empty(x.shape), state


def _backward_fake(grad_o: Tensor, grad_state: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    given = (x, *rest[:7], rest[9])
    return tuple(x.new_empty(0) if y is None else y.new_empty(y.shape) for y in given)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.softplus, mask, initial_state, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, mask, initial_state, cu_seqlens)


def _register(backend: str) -> None:
    name = f"{backend}_selective_scan"
    _library.define(f"{name}({_ARGUMENTS}) -> (Tensor o, Tensor state)")
    _library.define(
        f"{name}_backward(Tensor grad_o, Tensor grad_state, {_ARGUMENTS}) -> ({_GRADIENTS})"
    )

    def kernels() -> Any:
        return importlib.import_module(f"linattn.{backend}.selective_scan")

    def run(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        with launching(x):
            return kernels().forward(x, *rest)

    def run_backward(grad_o: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        with launching(grad_o):
            return kernels().backward(grad_o, *rest)

    def differentiate(ctx: Any, grad_o: Tensor, grad_state: Tensor) -> tuple[Any, ...]:
        *tensors, mask, initial_state, cu_seqlens = ctx.saved_tensors
        operator = getattr(torch.ops.linattn, f"{name}_backward")
        *found, d_initial = operator(
            grad_o, grad_state, *tensors, ctx.softplus, mask, initial_state, cu_seqlens
        )
        found = [None if x is None else dx for x, dx in zip(tensors, found, strict=True)]
        return *found, None, None, None if initial_state is None else d_initial, None

    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(f"{name}_backward", run_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn::{name}", _fake, lib=_library)
    torch.library.register_fake(f"linattn::{name}_backward", _backward_fake, lib=_library)
    torch.library.register_autograd(
        f"linattn::{name}", differentiate, setup_context=_save, lib=_library
    )
    rule = one_call_each(getattr(torch.ops.linattn, name))
    torch.library.register_vmap(f"linattn::{name}", rule, lib=_library)
    torch.library.register_autograd(
        f"linattn::{name}_backward", no_second_derivative("selective_scan"), lib=_library
    )


for _backend in BACKENDS:
    _register(_backend)
