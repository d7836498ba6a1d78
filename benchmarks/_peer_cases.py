"""What `cpu_peers.py` measures: one function a section, one call a case."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _peers import KINDS, options, peers, softmax
from torch import Tensor

from linattn import causal_conv1d, linear_attention

Call = Callable[[], object]
SECONDS = 1.5  # of turns, for each call


def in_turn(calls: dict[str, Call], seconds: float = SECONDS) -> dict[str, dict[str, Any]]:
    """Return best and median seconds of each call, all run in turn; a failure gives its error.

    Each has `seconds` of turns, after a first one that does not count (modules are loaded in it)
    unless it took ten times as long.
    """
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        start = time.perf_counter()
        error = _error_of(call)
        first = time.perf_counter() - start
        if error is not None:
            found[name] = {"error": error}
        else:
            times[name] = [first] if first > 10 * seconds else []
    while waiting := [name for name, spent in times.items() if sum(spent) < seconds]:
        for name in waiting:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    for name, spent in times.items():
        found[name] = {"best": min(spent), "median": statistics.median(spent), "turns": len(spent)}
    return found


def _error_of(call: Call) -> str | None:
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        return str(error).splitlines()[0][:80]
    return None


def tensors(
    N: int, H: int, D: int, kind: str, dtype: str
) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Return (q, k, v), the options of the kind, and the gradient of o."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, N, H, D)
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    found = options(kind, shape, generator)
    return [x.to(getattr(torch, dtype)) for x in (q, k, v)], found, grad.to(getattr(torch, dtype))


def both(
    function: Callable[..., Tensor], x: list[Tensor], kind: dict[str, Any], grad: Tensor
) -> tuple[Call, Call]:
    """Return the forward pass without gradients, and forward and backward."""

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*x, **kind)

    def forward_backward() -> object:
        leaves = [t.detach().requires_grad_() for t in x]
        gates = {
            n: t.detach().requires_grad_() if isinstance(t, Tensor) else t for n, t in kind.items()
        }
        o = function(*leaves, **gates)
        return torch.autograd.grad(
            o, [*leaves, *(t for t in gates.values() if isinstance(t, Tensor))], grad
        )

    return forward, forward_backward


def matmul(dtype: str) -> tuple[Call, float]:
    """Return the batched product [64, 128, 64] x [64, 64, 128] eight times over, and its FLOPs."""
    of = getattr(torch, dtype)
    a, b, c = (
        torch.randn(64, 128, 64).to(of),
        torch.randn(64, 64, 128).to(of),
        torch.empty(64, 128, 128, dtype=of),
    )
    return lambda: [torch.bmm(a, b, out=c) for _ in range(8)], 8.0 * 64 * 2 * 128 * 64 * 128


def native(*args: Any, **kwargs: Any) -> Tensor:
    """linear_attention on the cpu backend."""
    return linear_attention(*args, **kwargs, backend="cpu")


def kinds(kind: str, D: int, dtype: str, H: int = 16, N: int = 4096) -> list[dict[str, Any]]:
    """One kind of recurrence: the cpu backend, its peers and the matmul rate."""
    x, more, grad = tensors(N, H, D, kind, dtype)
    product, flops = matmul(dtype)
    functions = {"linattn cpu": native, **peers(kind)}
    small = [t[:, :256].float() for t in x]
    few = {n: t[:, :256] if isinstance(t, Tensor) and t.dim() > 1 else t for n, t in more.items()}
    expected = native(*small, **few)
    for name, function in functions.items():
        torch.testing.assert_close(
            function(*small, **few),
            expected,
            rtol=1e-3,
            atol=1e-3,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    rows = []
    work = {"forward": 4.0 * D * D + 128 * D, "forward+backward": 14.0 * D * D + 512 * D}
    for i, passed in enumerate(work):
        calls = {n: both(f, x, more, grad)[i] for n, f in functions.items()}
        if passed == "forward+backward":  # a minute and gigabytes: a state for every token
            calls = {n: c for n, c in calls.items() if "recurrent" not in n}
        found = in_turn({"matmul": product, **calls})
        rate = flops / found["matmul"]["best"]
        for name, times in found.items():
            done = flops if name == "matmul" else work[passed] * N * H
            fraction = done / times["best"] / rate if "best" in times else math.nan
            rows.append({"pass": passed, "method": name, **times, "of matmul rate": fraction})
    return rows


def relative(D: int, dtype: str, H: int = 16, N: int = 4096) -> list[dict[str, Any]]:
    """All kinds of the cpu backend in turn, against no decay."""
    passes: tuple[dict[str, Call], dict[str, Call]] = ({}, {})
    for kind in KINDS:
        x, more, grad = tensors(N, H, D, kind, dtype)
        for calls, call in zip(passes, both(native, x, more, grad), strict=True):
            calls[kind] = call
    return [
        {"pass": passed, "method": name, **times}
        for passed, calls in zip(("forward", "forward+backward"), passes, strict=True)
        for name, times in in_turn(calls).items()
    ]


def softmax_section(N: int, dtype: str) -> list[dict[str, Any]]:
    """Against softmax attention at H=8 D=64."""
    x, _, grad = tensors(N, 8, 64, "none", dtype)
    rows = []
    for i, passed in enumerate(("forward", "forward+backward")):
        calls = {
            n: both(f, x, {}, grad)[i] for n, f in (("linattn cpu", native), ("softmax", softmax))
        }
        rows += [{"pass": passed, "method": n, **t} for n, t in in_turn(calls).items()]
    return rows


def threads(kind: str) -> list[dict[str, Any]]:
    """One sequence and one head of 65536 tokens on one thread and on two."""
    x, more, grad = tensors(65536, 1, 64, kind, "float32")
    rows = []
    for i, passed in enumerate(("forward", "forward+backward")):
        call = both(native, x, more, grad)[i]

        def on(count: int, call: Call = call) -> object:
            torch.set_num_threads(count)
            return call()

        calls: dict[str, Call] = {"1 thread": lambda: on(1), "2 threads": lambda: on(2)}
        rows += [{"pass": passed, "method": n, **t} for n, t in in_turn(calls).items()]
    return rows


def decode(kind: str, layers: int = 24, H: int = 16, D: int = 128) -> list[dict[str, Any]]:
    """One token through the states of 24 layers, against one pass over them and eager torch."""
    x, more, _ = tensors(1, H, D, kind, "float32")
    states = torch.randn(layers, 1, H, D, D) / D
    halves = states.bfloat16()
    g, beta = more["log_decay"], more.get("beta")

    @torch.no_grad()
    def ours(all_states: Tensor) -> None:
        for S in all_states:
            native(*x, **more, initial_state=S, out_state=S, return_state=True)

    @torch.no_grad()
    def eager() -> None:
        q, k, v = (t[:, 0] for t in x)
        for S in states:
            S.mul_(g[:, 0].exp()[..., None, None])
            write = v
            if beta is not None:
                write = beta[:, 0, :, None] * (v - (k[:, :, None] @ S)[:, :, 0])
            S.addcmul_(k[..., None], write[:, :, None])
            (q[:, :, None] @ S)[:, :, 0] * D**-0.5

    calls: dict[str, Call] = {
        "one pass over the states": lambda: states.mul_(0.999),
        "linattn cpu": lambda: ours(states),
        "linattn cpu, bfloat16 states": lambda: ours(halves),
        "eager torch": eager,
    }
    return [{"pass": "decode", "method": n, **t} for n, t in in_turn(calls).items()]


def convolution(N: int, dtype: str, C: int = 4096) -> list[dict[str, Any]]:
    """Four taps and SiLU, against torch's grouped conv1d."""
    of = getattr(torch, dtype)
    x, grad, weight = (
        torch.randn(1, N, C).to(of),
        torch.randn(1, N, C).to(of),
        torch.randn(C, 4).to(of),
    )

    def grouped(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.nn.functional.conv1d(x.mT, weight[:, None], padding=3, groups=C)[..., :N]
        return torch.nn.functional.silu(y).mT

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d(x, weight, activation="silu")

    rows = []
    for i, passed in enumerate(("forward", "forward+backward")):
        calls: dict[str, Call] = {
            n: both(f, [x, weight], {}, grad)[i]
            for n, f in (("linattn cpu", ours), ("torch conv1d", grouped))
        }
        calls["copy"] = x.clone
        rows += [{"pass": passed, "method": n, **t} for n, t in in_turn(calls).items()]
    return rows


RUN = {"kinds": kinds, "relative": relative, "softmax": softmax_section, "threads": threads,
       "decode": decode, "convolution": convolution}  # fmt: skip
