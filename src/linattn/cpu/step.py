"""Decoding on the native kernels, without gradients: step.cpp, with little Python around it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from linattn._validation import state_dtype
from linattn.cpu.eager import MOST_TOKENS, is_plain


@functools.cache
def _step() -> Callable[..., Tensor | None]:
    return torch.ops.linattn_cpu.step.default


def decode(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    mask: Tensor | None, initial_state: Tensor | None, out_state: Tensor | None,
    scale: float | None, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return o [B, N, H, Dv] and the state after the tokens; None: not a call for this kernel.

    Nothing has been checked before: what the library finds wrong is None as well, and left to the
    checks that have words for it. They take three times as long as the kernel for a small state.
    """
    if not is_plain(q, k, v, log_decay, beta, mask, initial_state, out_state):
        return None
    shape = q.shape
    if len(shape) != 4 or type(causal) is not bool or type(normalize) is not bool:
        return None
    N = shape[1]
    if not 1 <= N <= MOST_TOKENS:
        return None
    if not causal and (N > 1 or log_decay is not None or beta is not None):
        return None
    if type(bias) is not float or (scale is not None and type(scale) is not float):
        return None
    state = out_state
    if state is None:
        dtype = state_dtype(q.dtype)
        if initial_state is not None:
            state = q.new_empty(initial_state.shape, dtype=dtype)
        elif k.dim() != 4 or v.dim() != 4:
            return None
        else:
            B, _, heads, Dk = shape
            H, one = max(heads, k.shape[2], v.shape[2]), int(bias != 0.0 or normalize)
            state = q.new_empty((B, H, Dk + one, v.shape[3] + one), dtype=dtype)
    if state.is_neg():  # torch's fallback for it cannot write in place
        return None
    try:
        o = _step()(q, k, v, log_decay, beta, mask, initial_state, state, scale, bias, normalize)
    except RuntimeError:  # a tensor of a device, layout or dtype that the library cannot take
        return None
    if o is None:
        return None
    if out_state is not None:  # so that autograd notices if it had kept the state
        increment_version(out_state)
    return o, state
