"""The `cpu` kernels under every instruction set of this machine, beside the widest.

    python benchmarks/instruction_sets.py [--turns 12]

The set is chosen when the library is loaded, so each runs in a process of its own; they take turns,
and the best of all turns counts. About two minutes, with nothing else running.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Annotated

import torch
import typer

from linattn import bench, cpu, linear_attention

HEADS, LENGTH = 16, 4096


def measure() -> dict[str, float]:
    """Return the best milliseconds of a few calls of each kind, in this process."""
    torch.set_num_threads(2)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for D in (64, 128):
            shape = (1, LENGTH, HEADS, D)
            q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
            grad_o = torch.randn(shape).to(dtype)
            for decay in ("no decay", "one a token"):
                g = None if decay == "no decay" else -0.1 * torch.rand(1, LENGTH, HEADS)
                best = {"forward": float("inf"), "forward+backward": float("inf")}
                for _ in range(6):
                    start = time.perf_counter()
                    with torch.no_grad():
                        linear_attention(q, k, v, g, backend="cpu")
                    middle = time.perf_counter()
                    o = linear_attention(q, k, v, g, backend="cpu")
                    torch.autograd.grad(o, (q, k, v), grad_o)
                    stop = time.perf_counter()
                    best["forward"] = min(best["forward"], middle - start)
                    best["forward+backward"] = min(best["forward+backward"], stop - middle)
                for passed, seconds in best.items():
                    name = f"{str(dtype).removeprefix('torch.')}, D={D}, {decay}, {passed}"
                    found[name] = seconds * 1e3
    return found


def main(
    turns: Annotated[int, typer.Option(min=1)] = 8, child: Annotated[bool, typer.Option()] = False
) -> None:
    """Print milliseconds under the widest set, and how many times that the others take."""
    x = torch.ones(1, 1, 1, 1)
    linear_attention(x, x, x, backend="cpu")  # loads the library
    if child:
        print(json.dumps(measure()))
        return
    about = bench.environment(bench.Config(backend="cpu"))
    print(", ".join(f"{name} {about[name]}" for name in ("date", "machine", "torch", "commit")))
    widest = cpu.INSTRUCTION_SETS.index(cpu.instruction_set())
    sets = cpu.INSTRUCTION_SETS[: widest + 1]
    best: dict[str, dict[str, float]] = {name: {} for name in sets}
    for _ in range(turns):
        for name in sets:
            done = subprocess.run(
                [sys.executable, __file__, "--child"],
                env={**os.environ, "LINATTN_CPU_ISA": name},
                capture_output=True,
                text=True,
                check=True,
            )
            for case, ms in json.loads(done.stdout).items():
                best[name][case] = min(best[name].get(case, ms), ms)
    print(f"H={HEADS} N={LENGTH}, 2 threads; {sets[-1]} in ms, the others over it")
    for case, ms in best[sets[-1]].items():
        others = ", ".join(f"{name} {best[name][case] / ms:.2f}x" for name in reversed(sets[:-1]))
        print(f"{case}: {ms:.2f} ms; {others}")


if __name__ == "__main__":
    typer.run(main)
