"""Decoding on the native kernels, without gradients: step.cpp, with little Python around it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from linattn import cpu
from linattn._validation import state_dtype

# Tokens up to which a pass over the state for each serves: a chunk of 32 costs about as much.
MOST_TOKENS = 16


def decode(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    mask: Tensor | None, initial_state: Tensor | None, out_state: Tensor | None,
    scale: float | None, bias: float, normalize: bool, causal: bool,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return o [B, N, H, Dv] and the state after the tokens; None: not a call for this kernel.

    Nothing has been checked before: what the library finds wrong is None as well, and left to the
    checks that have words for it. They take three times as long as the kernel for a small state.
    """
    if torch.compiler.is_compiling() or not cpu.load()[0]:
        return None
    # A tangent, a batch of torch.func or a mode that looks at operators must see the general path.
    if (
        forward_ad._current_level >= 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return None
    recorded = torch.is_grad_enabled()
    for x in (q, k, v, log_decay, beta, mask, initial_state, out_state):
        if x is None:
            continue
        if type(x) not in (Tensor, Parameter) or (recorded and x.requires_grad):
            return None
        if not x.is_cpu or x.layout is not torch.strided or x.is_neg():
            return None
    if not (q.dim() == k.dim() == v.dim() == 4):
        return None
    B, N, heads, Dk = q.shape
    if not 1 <= N <= MOST_TOKENS or type(causal) is not bool or type(normalize) is not bool:
        return None
    if not causal and (N > 1 or log_decay is not None or beta is not None):
        return None
    if type(bias) is not float or (scale is not None and type(scale) is not float):
        return None
    state = out_state
    if state is None:
        dtype = state_dtype(q.dtype)
        if initial_state is not None:
            contiguous = torch.contiguous_format
            state = torch.empty_like(initial_state, dtype=dtype, memory_format=contiguous)
        else:
            H, one = max(heads, k.shape[2], v.shape[2]), int(bias != 0.0 or normalize)
            state = q.new_empty((B, H, Dk + one, v.shape[3] + one), dtype=dtype)
    o = torch.ops.linattn_cpu.step.default(
        q, k, v, log_decay, beta, mask, initial_state, state, scale, bias, normalize
    )
    if o is None:
        return None
    if out_state is not None:  # so that autograd notices if it had kept the state
        increment_version(out_state)
    return o, state
