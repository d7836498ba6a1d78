"""What `linear_attention` accepts: a refusal names the argument, what it got, what it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states are kept and sums are taken: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast on the device of x, which may know none, like meta."""
    if not torch.amp.is_autocast_available(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@contextmanager
def launching(x: Tensor) -> Iterator[None]:
    """Be without autocast, and on the GPU of x: Triton launches on whichever is the current one."""
    with without_autocast(x), torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        yield


def reject(
    name: str, got: object, expected: str, *, kind: type[Exception] = ValueError
) -> NoReturn:
    """Raise `kind` in the one form that all errors here share."""
    raise kind(f"{name}: got {got}; expected {expected}")


def require_tensor(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        reject(name, type(value).__name__, "a torch.Tensor", kind=TypeError)


def is_readable(x: Tensor) -> bool:
    """Return whether x has values to look at: not in a traced or mapped function, not a fake."""
    return not (
        torch.compiler.is_compiling()
        or x.is_meta
        or torch._C._functorch.is_batchedtensor(x)
        or isinstance(x, FakeTensor)
    )


def require_number(name: str, value: object) -> None:
    """Raise unless `value` is a finite Python number (a bool is not a number here)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        reject(name, f"{type(value).__name__} {value!r}", "a float", kind=TypeError)
    # A traced number has no value to look at.
    if torch.compiler.is_compiling():
        return
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond any float
        finite = False
    if not finite:
        reject(name, "a number out of range" if isinstance(value, int) else value, "a finite float")


def require_positive_int(name: str, value: object) -> None:
    """Raise unless value is an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        reject(name, f"{type(value).__name__} {value!r}", "an int", kind=TypeError)
    if value < 1:
        reject(name, value, "an int >= 1")


def require_seed(seed: object) -> None:
    """Raise ValueError unless `seed` is an int that all of torch, numpy and products of it take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**40:
        reject("seed", repr(seed), "an int from 0 to 2**40 - 1")


def require_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        reject(name, f"{type(value).__name__} {value!r}", "True or False", kind=TypeError)


def require_shape(name: str, tensor: Tensor, letters: str, expected: list[int]) -> None:
    """Raise ValueError unless the shape is the expected one, `letters` in words."""
    if list(tensor.shape) != expected:
        reject(name, f"shape {list(tensor.shape)}", f"{letters} = {expected}")


def require_like(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], q: Tensor, of: str = "q"
) -> None:
    """Raise unless the tensor has one of the dtypes and lies where q, the argument `of`, does."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dict.fromkeys(str(d) for d in dtypes))
        reject(name, tensor.dtype, wanted, kind=TypeError)
    if tensor.device != q.device:
        reject(name, f"device {tensor.device}", f"device {q.device}, as {of}")
    require_strided(name, tensor)


def require_strided(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a sparse tensor, or one of another layout that has no strides."""
    if tensor.layout is not torch.strided:
        reject(name, tensor.layout, "a dense tensor (torch.strided)")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Check q, k and v and return H, the number of heads (the largest of theirs)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, x)
        require_strided(name, x)
        if x.dim() != 4:
            reject(name, f"shape {list(x.shape)}", "4 dimensions [B, N, H, D]")
        if x.shape[2] < 1 or x.shape[3] < 1:
            reject(name, f"shape {list(x.shape)}", "at least one head and one channel")
    if q.dtype not in FLOAT_DTYPES:
        wanted = "torch.float64, torch.float32, torch.bfloat16 or torch.float16"
        reject("q", q.dtype, wanted, kind=TypeError)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            reject(name, x.dtype, f"{q.dtype}, the dtype of q", kind=TypeError)
        if x.device != q.device:
            reject(name, f"device {x.device}", f"device {q.device}, as q")
        if x.shape[:2] != q.shape[:2]:
            expected = f"[B, N] = {list(q.shape[:2])} first, as q"
            reject(name, f"shape {list(x.shape)}", expected)
    if k.shape[3] != q.shape[3]:
        reject("k", f"shape {list(k.shape)}", f"Dk = {q.shape[3]} channels, as q")
    H = max(q.shape[2], k.shape[2], v.shape[2])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if H % x.shape[2] != 0:
            expected = f"a number of heads that divides H = {H}, the largest of q, k and v"
            reject(name, f"{x.shape[2]} heads", expected)
    return H


def check_log_decay(log_decay: Tensor, q: Tensor, H: int) -> None:
    """Check the shape and dtype of log_decay; for [H] also that it is <= 0 (cheap there)."""
    require_tensor("log_decay", log_decay)
    B, N, _, Dk = q.shape
    require_like("log_decay", log_decay, (q.dtype, torch.float32), q)
    shapes = {1: ("[H]", [H]), 3: ("[B, N, H]", [B, N, H]), 4: ("[B, N, H, Dk]", [B, N, H, Dk])}
    if log_decay.dim() not in shapes:
        options = " or ".join(f"{letters} = {shape}" for letters, shape in shapes.values())
        reject("log_decay", f"shape {list(log_decay.shape)}", options)
    require_shape("log_decay", log_decay, *shapes[log_decay.dim()])
    # Only where it costs nothing: H numbers in host memory. Asked this way, NaN is refused as well.
    free = log_decay.dim() == 1 and log_decay.device.type == "cpu" and is_readable(log_decay)
    if free and not bool((log_decay <= 0).all()):
        reject("log_decay", f"a largest value of {float(log_decay.max())}", "values <= 0")


def check_options(
    causal: bool, bias: float, normalize: bool, log_decay: Tensor | None, beta: Tensor | None
) -> None:
    """Refuse the combinations of kernel, decay and delta rule that have no definition."""
    if not causal and log_decay is not None:
        reject("log_decay", "a decay with causal=False", "None: every token sees all tokens")
    if not causal and beta is not None:
        reject("beta", "a delta rule with causal=False", "None: every token sees all tokens")
    if bias == 0.0 and not normalize:
        return
    name, got = ("bias", bias) if bias != 0.0 else ("normalize", True)
    if beta is not None:
        reject(name, f"{got} with beta", "bias=0.0 and normalize=False with the delta rule")
    if log_decay is not None and log_decay.dim() == 4:
        expected = "bias=0.0 and normalize=False with a per-channel log_decay"
        reject(name, f"{got} with log_decay [B, N, H, Dk]", expected)


def check_beta(beta: Tensor, q: Tensor, H: int) -> None:
    """Check the shape and dtype of beta."""
    require_tensor("beta", beta)
    require_like("beta", beta, (q.dtype, torch.float32), q)
    require_shape("beta", beta, "[B, N, H]", [q.shape[0], q.shape[1], H])


def check_mask(mask: Tensor, q: Tensor, of: str = "q") -> None:
    """Check the shape and dtype of mask."""
    require_tensor("mask", mask)
    require_like("mask", mask, (torch.bool,), q, of)
    require_shape("mask", mask, "[B, N]", list(q.shape[:2]))


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, of: str = "q") -> None:
    """Check the form of cu_seqlens; `sequence_bounds` checks its values where they are read."""
    require_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.is_meta and not q.is_meta:
        reject("cu_seqlens", "device meta", "a tensor with values, on any device")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        reject("cu_seqlens", cu_seqlens.dtype, "torch.int32 or torch.int64", kind=TypeError)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        reject("cu_seqlens", f"shape {list(cu_seqlens.shape)}", "[S + 1] with S >= 1 sequences")
    if torch._C._functorch.is_batchedtensor(cu_seqlens):
        reject("cu_seqlens", "bounds mapped by torch.vmap", "the same bounds for every call")
    if q.shape[0] != 1:
        reject("cu_seqlens", f"{of} with B = {q.shape[0]} rows", "one packed row, B = 1")
    if is_readable(cu_seqlens):
        sequence_bounds(cu_seqlens, q.shape[1])


def sequence_bounds(cu_seqlens: Tensor, N: int) -> list[int]:
    """Return cu_seqlens as a list, after checking that it starts at 0, never falls, ends at N."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0:
        reject("cu_seqlens", f"a first value of {bounds[0]}", "0")
    if bounds[-1] != N:
        reject("cu_seqlens", f"a last value of {bounds[-1]}", f"N = {N}")
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            reject("cu_seqlens", f"{start} then {stop} at {i}", "values that never fall")
    return bounds


def check_state(
    name: str, state: Tensor, q: Tensor, v: Tensor, H: int, sequences: int, affine: bool
) -> None:
    """Check the shape, dtype and device of a state tensor."""
    require_tensor(name, state)
    dtype = state_dtype(q.dtype)
    require_like(name, state, (dtype, torch.bfloat16) if dtype == torch.float32 else (dtype,), q)
    one = int(affine)
    letters = ("[B, H, Dk + 1, Dv + 1]" if affine else "[B, H, Dk, Dv]") + " (packed: B = S)"
    require_shape(name, state, letters, [sequences, H, q.shape[3] + one, v.shape[3] + one])


def check_out_state(out_state: Tensor, inputs: list[Tensor | None]) -> None:
    """Refuse to write into a tensor that autograd still needs, or whose elements are shared."""
    given = [out_state, *inputs]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        expected = "out_state=None while gradients are recorded, or torch.no_grad()"
        reject("out_state", "a tensor to overwrite and inputs that require grad", expected)
    reached = 0  # from the first element, by the dimensions of smaller strides
    overlap = False
    for s, n in sorted(zip(out_state.stride(), out_state.shape, strict=True)):
        overlap = overlap or (n > 1 and s <= reached)
        reached += (n - 1) * s
    if overlap and out_state.numel() > 0:
        strides = list(out_state.stride())
        reject("out_state", f"strides {strides}", "memory of its own for each element")
