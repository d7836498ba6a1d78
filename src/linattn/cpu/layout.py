"""What both families of the native kernels are given to write to."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn._validation import sequence_bounds, state_dtype
from linattn.cpu import segment


def heads(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return H, the largest number of heads."""
    return max(q.shape[2], k.shape[2], v.shape[2])


def bounds_of(cu_seqlens: Tensor | None, N: int) -> Tensor | None:
    """Return the checked bounds of packed sequences as the kernels read them."""
    if cu_seqlens is None:
        return None
    sequence_bounds(cu_seqlens, N)
    return cu_seqlens.to("cpu", torch.int64).contiguous()


def saved_shape(B: int, N: int, H: int, Dk: int, Dv: int, one: int) -> tuple[int, ...]:
    """Return the shape of the states that backward starts from: [N / segment, B, H, ...], flat.

    A state before token t is in place t / segment - 1: packed or not, no two share one. Two numbers
    more, so that a symbolic N need not be asked whether there are any (torch.export).
    """
    return (N // segment(Dk) * B * H * (Dk + one) * (Dv + one) + 2,)


def results(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, affine: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, the final state and the saved states, to be written."""
    (B, N, _, Dk), Dv, H, one = q.shape, v.shape[3], heads(q, k, v), int(affine)
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = state_dtype(q.dtype)
    o = v.new_empty(B, N, H, Dv)
    state = q.new_empty((sequences, H, Dk + one, Dv + one), dtype=dtype)
    saved = q.new_empty(saved_shape(B, N, H, Dk, Dv, one) if save else 0, dtype=dtype)
    # Some places stay unused: the last one, and others where sequences are packed.
    whole = (N - 1) // segment(Dk) if N > 0 and cu_seqlens is None else 0
    saved[whole * B * H * (Dk + one) * (Dv + one) :].zero_()
    return o, state, saved


def gradient_of(x: Tensor, H: int) -> Tensor:
    """Return room for the gradient of q, k or v; in 32 bits where heads are summed into it."""
    shared = x.shape[2] != H and x.dtype != torch.float64
    return torch.empty(x.shape, dtype=torch.float32 if shared else x.dtype, device=x.device)


def gradient_of_decay(log_decay: Tensor | None, sequences: int) -> Tensor | None:
    """Return room for the gradient of log_decay; for [H] one number a sequence and head."""
    if log_decay is None:
        return None
    if log_decay.dim() == 1:
        return log_decay.new_empty((sequences, log_decay.shape[0]), dtype=torch.float64)
    return torch.empty(log_decay.shape, dtype=log_decay.dtype, device=log_decay.device)


def finish_decay(found: Tensor | None, log_decay: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient of log_decay as its operator gives it: empty where there is none."""
    if found is None or log_decay is None:
        return like.new_empty(0)
    return found.sum(0).to(log_decay.dtype) if log_decay.dim() == 1 else found
