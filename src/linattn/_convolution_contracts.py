"""The torch.library operators of `causal_conv1d`: schemas, fakes and autograd. No numerics."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from linattn import triton
from linattn._tangents import no_second_derivative, refuse_tangents
from linattn._validation import launching
from linattn._vmap import convolution_batching_rule

_library = torch.library.Library("linattn", "FRAGMENT")

BACKENDS = ("chunked", "cpu", "triton")
_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? mask, Tensor? initial_state, "
    "Tensor? cu_seqlens"
)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a checked call on a fast backend; return o and the final state."""
    if backend == "triton":
        triton.require_supported("x", x)
    refuse_tangents("causal_conv1d", 'use backend="reference"', x, weight, bias, initial_state)
    operator = getattr(torch.ops.linattn, f"{backend}_convolution")
    o, state = operator(x, weight, bias, silu, mask, initial_state, cu_seqlens)
    return o, state


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = x.new_empty(sequences, weight.shape[1] - 1, x.shape[2])
    return x.new_empty(x.shape), state


def _backward_fake(
    grad_o: Tensor, grad_state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    silu: bool, mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    given = (x, weight, bias, initial_state)
    return tuple(x.new_empty(0) if y is None else y.new_empty(y.shape) for y in given)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.silu, mask, initial_state, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, bias, mask, initial_state, cu_seqlens)


def _register(backend: str) -> None:
    name = f"{backend}_convolution"
    _library.define(f"{name}({_ARGUMENTS}) -> (Tensor o, Tensor state)")
    _library.define(
        f"{name}_backward(Tensor grad_o, Tensor grad_state, {_ARGUMENTS}) "
        "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)"
    )

    def kernels() -> Any:
        return importlib.import_module(f"linattn.{backend}.convolution")

    def run(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        with launching(x):
            return kernels().forward(x, *rest)

    def run_backward(grad_o: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        with launching(grad_o):
            return kernels().backward(grad_o, *rest)

    def differentiate(ctx: Any, grad_o: Tensor, grad_state: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mask, initial_state, cu_seqlens = ctx.saved_tensors
        operator = getattr(torch.ops.linattn, f"{name}_backward")
        dx, dweight, dbias, d_initial = operator(
            grad_o, grad_state, x, weight, bias, ctx.silu, mask, initial_state, cu_seqlens
        )
        dbias = None if bias is None else dbias
        d_initial = None if initial_state is None else d_initial
        return dx, dweight, dbias, None, None, d_initial, None

    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(f"{name}_backward", run_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn::{name}", _fake, lib=_library)
    torch.library.register_fake(f"linattn::{name}_backward", _backward_fake, lib=_library)
    torch.library.register_autograd(
        f"linattn::{name}", differentiate, setup_context=_save, lib=_library
    )
    rule = convolution_batching_rule(getattr(torch.ops.linattn, name))
    torch.library.register_vmap(f"linattn::{name}", rule, lib=_library)
    torch.library.register_autograd(
        f"linattn::{name}_backward", no_second_derivative("causal_conv1d"), lib=_library
    )


for _backend in BACKENDS:
    _register(_backend)
