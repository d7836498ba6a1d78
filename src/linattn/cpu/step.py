"""A few tokens of decoding on the native kernels, without gradients: step.cpp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn._validation import state_dtype

# Tokens up to which a pass over the state for each is faster than a chunk of 32: docs/cpu.md.
MOST_TOKENS = 16


def serves(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor | None, ...], state: Tensor | None,
    causal: bool,
) -> bool:  # fmt: skip
    """Return whether these are 1 to 16 tokens, of plain tensors, without gradients.

    Under torch.compile the number of tokens may be a symbol, and asking would be a guard on it.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if not (q.shape[1] == 1 or (causal and 1 <= q.shape[1] <= MOST_TOKENS)):
        return False
    given = [x for x in (q, k, v, state, *gates) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    if forward_ad._current_level >= 0:  # a tangent may ride on any tensor
        return False
    return all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in given)


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    mask: Tensor | None, initial_state: Tensor | None, out_state: Tensor | None,
    scale: float, bias: float, normalize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, N, H, Dv] and the state after the tokens, in out_state if that is possible."""
    B, N, Hq, Dk = q.shape
    H, Dv, one = max(Hq, k.shape[2], v.shape[2]), v.shape[3], int(bias != 0.0 or normalize)
    dtype = state_dtype(q.dtype)
    if out_state is not None:
        if initial_state is None or initial_state.dtype == out_state.dtype:
            dtype = out_state.dtype
        if dtype != out_state.dtype or not _writable(out_state, initial_state):
            out_state = None  # the caller copies, and rounds
    if out_state is None:
        out_state = torch.empty((B, H, Dk + one, Dv + one), dtype=dtype)
    if initial_state is not None and initial_state is not out_state:
        initial_state = initial_state.to(dtype).contiguous()
    o = torch.empty((B, N, H, Dv), dtype=q.dtype)
    torch.ops.linattn_cpu.step.default(
        q, k, v, log_decay, beta, mask, initial_state, scale, bias, normalize, o, out_state
    )
    return o, out_state


def _writable(out_state: Tensor, initial_state: Tensor | None) -> bool:
    """Return whether out_state can be written while initial_state is read, one row at a time."""
    if not out_state.is_contiguous():
        return False
    if initial_state is None or initial_state is out_state:
        return True
    distance = out_state.data_ptr() - initial_state.data_ptr()
    if distance == 0:
        return initial_state.is_contiguous()
    span = sum(
        (n - 1) * s for n, s in zip(initial_state.shape, initial_state.stride(), strict=True)
    )
    size = initial_state.element_size()
    return distance > span * size or -distance >= out_state.numel() * size
