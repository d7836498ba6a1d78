"""The `cpu` kernels beside the machine's matmul rate, and one sequence on two threads beside one.

    python benchmarks/cpu_kernels.py

Outputs are allocated before; all that is compared runs in turn, and the best of many turns counts.
The figures of docs/cpu.md are its output. About a minute, with nothing else running.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from linattn import bench, linear_attention
from linattn.cpu import segment

HEADS, LENGTH = 16, 4096
ONE_SEQUENCE = 65536


def best_of(calls: dict[str, Callable[[], object]], turns: int = 30) -> dict[str, float]:
    """Return the least seconds of each call, all run in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def fractions(D: int) -> str:
    """Return forward and backward without decay as fractions of the batched matmul rate."""
    shape = (1, LENGTH, HEADS, D)
    q, k, v, grad_o, o, dq, dk, dv = (torch.randn(shape) for _ in range(8))
    state, grad_state = torch.zeros(1, HEADS, D, D), torch.zeros(1, HEADS, D, D)
    saved = torch.zeros(LENGTH // segment(D) * HEADS * D * D + 2)
    forward = torch.ops.linattn_cpu.additive_forward.default
    backward = torch.ops.linattn_cpu.additive_backward.default
    call = (q, k, v, None, None, None, None, D**-0.5, 0.0, False, True, segment(D))
    a, b, c = torch.randn(64, 128, 64), torch.randn(64, 64, 128), torch.empty(64, 128, 128)
    seconds = best_of(
        {
            "matmul": lambda: [torch.bmm(a, b, out=c) for _ in range(8)],
            "forward": lambda: forward(*call, o, state, saved),
            "backward": lambda: backward(
                grad_o, grad_state, state, saved, *call, dq, dk, dv, None, None
            ),
        }
    )
    rate = 8 * 64 * 2 * 128 * 64 * 128 / seconds["matmul"]
    tokens = LENGTH * HEADS
    whole = {"forward": 4 * D * D + 128 * D, "backward": 10 * D * D + 384 * D}
    found = ", ".join(f"{n} {tokens * f / seconds[n] / rate:.2f}" for n, f in whole.items())
    return f"D={D}: {found} of {rate / 1e9:.0f} GFLOP/s"


def two_threads(decay: bool) -> str:
    """Return the time of one thread over that of two, one sequence and one head."""
    q, k, v = (torch.randn(1, ONE_SEQUENCE, 1, 64, requires_grad=True) for _ in range(3))
    g = -torch.rand(1, ONE_SEQUENCE, 1) if decay else None
    grad_o = torch.randn(1, ONE_SEQUENCE, 1, 64)

    def step(threads: int) -> None:
        torch.set_num_threads(threads)
        o = linear_attention(q, k, v, g, backend="cpu")
        torch.autograd.grad(o, (q, k, v), grad_o)

    seconds = best_of({"one": lambda: step(1), "two": lambda: step(2)}, turns=25)
    kind = "one decay a token" if decay else "no decay"
    return f"H=1 D=64 N={ONE_SEQUENCE}, {kind}: two threads {seconds['one'] / seconds['two']:.2f}x"


def main() -> None:
    """Print all figures, with date, machine, versions and commit."""
    x = torch.ones(1, 1, 1, 1)
    linear_attention(x, x, x, backend="cpu")  # loads the library
    about = bench.environment(bench.Config(backend="cpu"))
    print(", ".join(f"{name} {about[name]}" for name in ("date", "machine", "torch", "commit")))
    torch.set_num_threads(2)
    for D in (64, 128):
        print(f"float32, H={HEADS}, N={LENGTH},", fractions(D))
    for decay in (False, True):
        print("float32, forward and backward,", two_threads(decay))


if __name__ == "__main__":
    main()
