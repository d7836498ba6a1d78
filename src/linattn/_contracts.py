"""The torch.library operators: schemas, fakes and autograd. No numerics; backends load when called.

Each operator returns (o, final state, saved states); its backward is an operator too, so that
compiled and exported graphs keep the hand-derived gradient. A backward has no derivative of its
own: asking for one is an error that says what to use.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from linattn import triton
from linattn._tangents import no_second_derivative, refuse_tangents
from linattn._validation import launching, state_dtype, without_autocast
from linattn._vmap import batching_rule

_library = torch.library.Library("linattn", "DEF")

BACKENDS = ("chunked", "cpu", "triton")
_ARGUMENTS = {
    "additive": "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? mask, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, float bias, bool normalize, "
    "bool causal, bool save",
    "delta": "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor beta, Tensor? mask, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, bool save",
}
_GRADIENTS = {
    "additive": "Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, Tensor dinitial_state",
    "delta": "Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, Tensor dbeta, "
    "Tensor dinitial_state",
}
for _backend in BACKENDS:
    for _family, _arguments in _ARGUMENTS.items():
        _name = f"{_backend}_{_family}"
        _library.define(f"{_name}({_arguments}) -> (Tensor o, Tensor state, Tensor saved)")
        _library.define(
            f"{_name}_backward(Tensor grad_o, Tensor grad_state, Tensor state, Tensor saved, "
            f"{_arguments}) -> ({_GRADIENTS[_family]})"
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    mask: Tensor | None, initial_state: Tensor | None, out_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bias: float, normalize: bool, causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a checked call of `linear_attention` on a fast backend; return o and the final state."""
    if backend == "triton":
        heads = max(q.shape[2], k.shape[2], v.shape[2])
        triton.require_supported("q", q, q.shape[3], v.shape[3], heads=heads)
    if q.shape[1] == 1 and cu_seqlens is None:  # one token is causal and not
        from linattn.chunked import step

        context = without_autocast(q)
        if backend == "triton" and _is_plain(q, k, v, log_decay, beta, mask, initial_state):
            from linattn.triton import step  # type: ignore[no-redef]

            context = launching(q)
        with context:
            return step.forward(
                q, k, v, log_decay, beta, mask, initial_state, out_state, scale, bias, normalize
            )
    given = (q, k, v, log_decay, beta, initial_state)
    refuse_tangents("linear_attention", 'use backend="reference"', *given)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if beta is not None:
        operator = getattr(torch.ops.linattn, f"{backend}_delta")
        o, state, _ = operator(
            q, k, v, log_decay, beta, mask, initial_state, cu_seqlens, scale, save
        )
    else:
        operator = getattr(torch.ops.linattn, f"{backend}_additive")
        o, state, _ = operator(
            q, k, v, log_decay, mask, initial_state, cu_seqlens, scale, bias, normalize, causal,
            save,
        )  # fmt: skip
    return o, state


def _is_plain(*given: Tensor | None) -> bool:
    """Return whether a kernel may be launched as it stands: nothing is recorded, traced, mapped.

    Nor is a sign still to be turned (x.conj().imag), which the dispatcher would see to.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    tensors = [x for x in given if x is not None]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not recorded and all(
        type(x) in (Tensor, torch.nn.Parameter) and not x.is_neg() for x in tensors
    )


def _module(backend: str, name: str) -> Any:
    return importlib.import_module(f"linattn.{backend}.{name}")


def _kernels(backend: str, family: str) -> tuple[Any, Any]:
    """Return what runs an operator and its backward: the functions of the backend's module."""

    def forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        with launching(q):
            return _module(backend, family).forward(q, *rest)

    def backward(grad_o: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        with launching(grad_o):
            return _module(backend, family).backward(grad_o, *rest[:-1])  # not `save`

    return forward, backward


# --- fakes: shapes and dtypes ---------------------------------------------------------------------


def _fake(family: str, backend: str) -> tuple[Any, Any]:
    """Return the fakes of an operator and its backward; `x` are the arguments by name."""
    names = [a.split()[-1] for a in _ARGUMENTS[family].split(", ")]
    gradients = [g.split()[-1][1:] for g in _GRADIENTS[family].split(", ")]

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = dict(zip(names, arguments, strict=True))
        q, k, v, cu_seqlens = x["q"], x["k"], x["v"], x["cu_seqlens"]
        (B, N, _, Dk), Dv = q.shape, v.shape[3]
        H = max(q.shape[2], k.shape[2], v.shape[2])
        one = int(x.get("bias", 0.0) != 0.0 or x.get("normalize", False))
        sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        save = x["save"] and x.get("causal", True)
        places = _module(backend, "layout").saved_shape(B, N, H, Dk, Dv, one) if save else 0
        state = q.new_empty((sequences, H, Dk + one, Dv + one), dtype=state_dtype(q.dtype))
        return v.new_empty(B, N, H, Dv), state, state.new_empty(places)

    def backward(
        grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor, *arguments: Any
    ) -> tuple[Tensor, ...]:
        x = dict(zip(names, arguments, strict=True))
        return tuple(
            state.new_empty(0) if x[g] is None else x[g].new_empty(x[g].shape) for g in gradients
        )

    return forward, backward


# --- autograd -------------------------------------------------------------------------------------


def _register(backend: str, family: str) -> None:
    name, backward_name = f"{backend}_{family}", f"{backend}_{family}_backward"
    kernel, backward = _kernels(backend, family)
    fake, backward_fake = _fake(family, backend)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(backward_name, backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn::{name}", fake, lib=_library)
    torch.library.register_fake(f"linattn::{backward_name}", backward_fake, lib=_library)
    arguments = [a.split()[-1] for a in _ARGUMENTS[family].split(", ")]
    gradients = [g.split()[-1][1:] for g in _GRADIENTS[family].split(", ")]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        o, state, saved = output
        # Zeros for the gradient of `saved`, which no one reads, would cost as much as a fill of it.
        ctx.set_materialize_grads(False)
        ctx.shapes = o.shape, state.shape
        ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]
        # Of the outputs at most one state a segment; without causality the final state is read too.
        causal = inputs[arguments.index("causal")] if "causal" in arguments else True
        final = None if causal else state
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*tensors, final, saved)

    def differentiate(
        ctx: Any, grad_o: Tensor | None, grad_state: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        *tensors, final, saved = ctx.saved_tensors
        v, shapes = tensors[arguments.index("v")], ctx.shapes
        if grad_o is None:
            grad_o = v.new_zeros(shapes[0])
        if grad_state is None:
            grad_state = v.new_zeros(shapes[1], dtype=state_dtype(v.dtype))
        inputs = [o if t is None else t for t, o in zip(tensors, ctx.options, strict=True)]
        final = grad_state if final is None else final  # of that shape; not read
        operator = getattr(torch.ops.linattn, backward_name)
        results = operator(grad_o, grad_state, final, saved, *inputs)
        found = dict(zip(gradients, results, strict=True))
        return tuple(
            found[name] if name in found and tensors[i] is not None else None
            for i, name in enumerate(arguments)
        )

    torch.library.register_autograd(
        f"linattn::{name}", differentiate, setup_context=save, lib=_library
    )
    rule = batching_rule(getattr(torch.ops.linattn, name), arguments)
    torch.library.register_vmap(f"linattn::{name}", rule, lib=_library)
    torch.library.register_autograd(
        f"linattn::{backward_name}", no_second_derivative("linear_attention"), lib=_library
    )


for _backend in BACKENDS:
    for _family in _ARGUMENTS:
        _register(_backend, _family)
