"""Mamba-1's selective scan on the native kernels: selective_scan.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from linattn._validation import state_dtype
from linattn.cpu import layout
from linattn.cpu.eager import MOST_TOKENS, is_plain


@functools.cache
def _step() -> Callable[..., Tensor | None]:
    return torch.ops.linattn_cpu.selective_scan_step.default


def decode(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, mask: Tensor | None, initial_state: Tensor | None,
    out_state: Tensor | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return o and the state of a few tokens without gradients; None: not a call for this.

    Nothing has been checked before: what the library finds wrong is None as well, and left to the
    checks that have words for it.
    """
    given = (x, dt, A, b, c, skip, z, dt_bias, mask, initial_state, out_state)
    if not is_plain(*given) or x.dim() != 3 or A.dim() != 2 or type(softplus) is not bool:
        return None
    if not 1 <= x.shape[1] <= MOST_TOKENS:
        return None
    if out_state is None:
        state = x.new_empty(x.shape[0], *A.shape, dtype=state_dtype(x.dtype))
    else:
        state = out_state
    if state.is_neg():  # torch's fallback for it cannot write in place
        return None
    try:
        o = _step()(x, dt, A, b, c, skip, z, dt_bias, softplus, mask, initial_state, state)
    except RuntimeError:  # a tensor of a device, layout or dtype that the library cannot take
        return None
    if o is None:
        return None
    if out_state is not None:  # so that autograd notices if it had kept the state
        increment_version(out_state)
    return o, state


def forward(
    x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, mask: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and the final state."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = x.new_empty((sequences, *A.shape), dtype=state_dtype(x.dtype))
    torch.ops.linattn_cpu.selective_scan_forward(
        x, dt, A, b, c, skip, z, dt_bias, softplus, mask,
        None if initial_state is None else initial_state.contiguous(),
        layout.bounds_of(cu_seqlens, x.shape[1]), o, state,
    )  # fmt: skip
    return o, state


def backward(
    grad_o: Tensor, grad_state: Tensor, x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor,
    skip: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, softplus: bool,
    mask: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of all tensors in order, empty where there is none."""
    sums, parts = state_dtype(x.dtype), torch.get_num_threads()
    (B, N, D), n = x.shape, A.shape[1]

    def room(y: Tensor | None) -> Tensor | None:
        return None if y is None else torch.empty(y.shape, dtype=y.dtype, device=y.device)

    dx, ddt, dz, d_initial = room(x), room(dt), room(z), room(initial_state)
    # What several tasks add to, once for each thread.
    parameters = x.new_zeros((parts, n + 2, D), dtype=sums)
    db, dc = (x.new_zeros((parts, B, N, n), dtype=sums) for _ in range(2))
    torch.ops.linattn_cpu.selective_scan_backward(
        grad_o, grad_state.contiguous(), x, dt, A, b, c, skip, z, dt_bias, softplus, mask,
        None if initial_state is None else initial_state.contiguous(),
        layout.bounds_of(cu_seqlens, N), dx, ddt, dz, d_initial, parameters, db, dc,
    )  # fmt: skip
    of = parameters.sum(0)
    found = (
        dx, ddt, of[:n].t(), db.sum(0), dc.sum(0), of[n], dz, of[n + 1], d_initial
    )  # fmt: skip
    wanted = (x, dt, A, b, c, skip, z, dt_bias, initial_state)
    return tuple(
        x.new_empty(0) if y is None or gradient is None else gradient.to(y.dtype).contiguous()
        for y, gradient in zip(wanted, found, strict=True)
    )
