"""The torch.library operators: schemas, fakes and autograd. No numerics; backends load when called.

Each operator returns (o, final state, saved states); its backward is an operator too, so that
compiled and exported graphs keep the hand-derived gradient. A backward has no derivative of its
own: asking for one is an error that says what to use.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from linattn._validation import state_dtype
from linattn._vmap import batching_rule

_library = torch.library.Library("linattn", "DEF")

_ARGUMENTS = {
    "additive": "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? mask, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale, float bias, bool normalize, "
    "bool causal",
    "delta": "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor beta, Tensor? mask, "
    "Tensor? initial_state, Tensor? cu_seqlens, float scale",
}
_GRADIENTS = {
    "additive": "Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, Tensor dinitial_state",
    "delta": "Tensor dq, Tensor dk, Tensor dv, Tensor dlog_decay, Tensor dbeta, "
    "Tensor dinitial_state",
}
for _family, _arguments in _ARGUMENTS.items():
    _library.define(f"chunked_{_family}({_arguments}) -> (Tensor o, Tensor state, Tensor saved)")
    _library.define(
        f"chunked_{_family}_backward(Tensor grad_o, Tensor grad_state, Tensor state, Tensor saved, "
        f"{_arguments}) -> ({_GRADIENTS[_family]})"
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    mask: Tensor | None, initial_state: Tensor | None, out_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, bias: float, normalize: bool, causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a checked call of `linear_attention` on a fast backend; return o and the final state."""
    assert backend == "chunked", backend
    if q.shape[1] == 1 and cu_seqlens is None:  # one token is causal and not
        from linattn.chunked import step

        with torch.autocast(q.device.type, enabled=False):
            return step.forward(
                q, k, v, log_decay, beta, mask, initial_state, out_state, scale, bias, normalize
            )
    if beta is not None:
        o, state, _ = torch.ops.linattn.chunked_delta(
            q, k, v, log_decay, beta, mask, initial_state, cu_seqlens, scale
        )
    else:
        o, state, _ = torch.ops.linattn.chunked_additive(
            q, k, v, log_decay, mask, initial_state, cu_seqlens, scale, bias, normalize, causal
        )
    return o, state


# --- additive -------------------------------------------------------------------------------------


def _additive(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from linattn.chunked import additive, additive_noncausal

    with torch.autocast(q.device.type, enabled=False):
        if causal:
            return additive.forward(
                q, k, v, log_decay, mask, initial_state, cu_seqlens, scale, bias, normalize
            )
        o, state = additive_noncausal.forward(
            q, k, v, mask, initial_state, cu_seqlens, scale, bias, normalize
        )
        return o, state, state.new_zeros(_saved_shape(q, k, v, bias, normalize))


def _additive_backward(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from linattn.chunked import additive, additive_noncausal

    with torch.autocast(q.device.type, enabled=False):
        if causal:
            return additive.backward(
                grad_o, grad_state, q, k, v, log_decay, mask, initial_state, cu_seqlens, saved,
                scale, bias, normalize,
            )  # fmt: skip
        dq, dk, dv, d_initial = additive_noncausal.backward(
            grad_o, grad_state, q, k, v, mask, state, cu_seqlens, scale, bias, normalize
        )
        empty = state.new_empty(0)
        return dq, dk, dv, empty, state.new_empty(0) if initial_state is None else d_initial


# --- delta ----------------------------------------------------------------------------------------


def _delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from linattn.chunked import delta

    with torch.autocast(q.device.type, enabled=False):
        return delta.forward(q, k, v, log_decay, beta, mask, initial_state, cu_seqlens, scale)


def _delta_backward(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from linattn.chunked import delta

    with torch.autocast(q.device.type, enabled=False):
        return delta.backward(
            grad_o, grad_state, q, k, v, log_decay, beta, mask, initial_state, cu_seqlens, saved,
            scale,
        )  # fmt: skip


# --- fakes: shapes and dtypes ---------------------------------------------------------------------


def _saved_shape(
    q: Tensor, k: Tensor, v: Tensor, bias: float, normalize: bool
) -> tuple[int, int, int, int, int]:
    from linattn.chunked.layout import count_saved_states

    (B, N, _, Dk), Dv, one = q.shape, v.shape[3], int(bias != 0.0 or normalize)
    H = max(q.shape[2], k.shape[2], v.shape[2])
    return count_saved_states(N, H, Dk, Dv), B, H, Dk + one, Dv + one


def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, bias: float, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    saved = _saved_shape(q, k, v, bias, normalize)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = state_dtype(q.dtype)
    o = v.new_empty(q.shape[0], q.shape[1], saved[2], v.shape[3])
    state = q.new_empty((sequences, *saved[2:]), dtype=dtype)
    return o, state, q.new_empty(saved, dtype=dtype)


def _additive_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake(q, k, v, cu_seqlens, bias, normalize)


def _delta_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake(q, k, v, cu_seqlens, 0.0, False)


def _empty_or_like(x: Tensor | None, state: Tensor) -> Tensor:
    return state.new_empty(0) if x is None else x.new_empty(x.shape)


def _additive_backward_fake(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, mask: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(_empty_or_like(x, state) for x in (q, k, v, log_decay, initial_state))


def _delta_backward_fake(
    grad_o: Tensor, grad_state: Tensor, state: Tensor, saved: Tensor,
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(_empty_or_like(x, state) for x in (q, k, v, log_decay, beta, initial_state))


# --- autograd -------------------------------------------------------------------------------------


def _no_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(
        "linear_attention: second derivatives are not implemented by this backend; "
        'use backend="reference", whose derivatives are exact to any order'
    )


def _register(family: str, kernel: Any, backward: Any, fake: Any, backward_fake: Any) -> None:
    name, backward_name = f"chunked_{family}", f"chunked_{family}_backward"
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(backward_name, backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn::{name}", fake, lib=_library)
    torch.library.register_fake(f"linattn::{backward_name}", backward_fake, lib=_library)
    arguments = [a.split()[-1] for a in _ARGUMENTS[family].split(", ")]
    gradients = [g.split()[-1][1:] for g in _GRADIENTS[family].split(", ")]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, state, saved = output
        ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]
        # Of the outputs at most one state a segment; without causality the final state is read too.
        final = state if "causal" in arguments and not inputs[-1] else None
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.save_for_backward(*tensors, final, saved)

    def differentiate(ctx: Any, grad_o: Tensor, grad_state: Tensor, _: Tensor) -> tuple[Any, ...]:
        *tensors, final, saved = ctx.saved_tensors
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
        f"linattn::{backward_name}", _no_second_derivative, lib=_library
    )


_register("additive", _additive, _additive_backward, _additive_fake, _additive_backward_fake)
_register("delta", _delta, _delta_backward, _delta_fake, _delta_backward_fake)
