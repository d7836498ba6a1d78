"""One case of the benchmark, in a process of its own with a limit on its memory."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from linattn._bench_methods import Problem


def measure(
    problem: Problem, threads: int, memory_limit: int, seconds: float, pipe: Connection
) -> None:
    """Send one dict a pass ("forward", "forward+backward"), then None; or {"error": what}."""
    torch.set_num_threads(threads)
    if problem.device == "cpu" and sys.platform == "linux":
        # RLIMIT_DATA counts what is really allocated; RLIMIT_AS would count torch's mappings.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    try:
        for name in ("forward", "forward+backward"):
            pipe.send({"pass": name, **_measure_pass(problem, name, seconds)})
        pipe.send(None)
    except (RuntimeError, MemoryError) as error:
        # torch has no type of its own for a failed allocation on a CPU.
        text = str(error).splitlines()[0] if str(error) else "MemoryError"
        lowered = text.lower()
        memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
            words in lowered
            for words in ("can't allocate memory", "not enough memory", "bad_alloc")
        )
        pipe.send({"error": "out of memory" if memory else text})


def _measure_pass(problem: Problem, name: str, seconds: float) -> dict[str, Any]:
    leaves, grad = problem.inputs()
    function = problem.function()
    if name == "forward":
        run: Callable[[], Any] = torch.no_grad()(lambda: function(*leaves))
    else:
        leaves = [x.requires_grad_() for x in leaves]

        def run() -> Any:
            o = function(*leaves)
            return o, torch.autograd.grad(o, leaves, grad)

    warm_up(problem, name)
    # The first call alone shows the peak: later ones find memory that is already there.
    base = _start_peak(problem.device)
    start = time.perf_counter()
    result = run()
    _finish(problem.device)
    first = time.perf_counter() - start
    peak = _peak(problem.device) - base
    del result
    times: list[float] = []
    while first < seconds and (len(times) < 3 or sum(times) < 0.3) and sum(times) < seconds:
        start = time.perf_counter()
        run()
        _finish(problem.device)
        times.append(time.perf_counter() - start)
    times = times or [first]
    share = 1 / 8 if name == "forward" else 4 / 8  # o; o and the gradients of q, k and v
    extra = peak - share * problem.tensor_bytes()
    return {
        "best_s": min(times),
        "median_s": statistics.median(times),
        "repeats": len(times),
        "peak_bytes": peak,
        "extra_memory_ratio": extra / problem.tensor_bytes(),
    }


def warm_up(problem: Problem, name: str) -> None:
    """Run the method once on 64 tokens: threads, libraries and their buffers are then there."""
    small = replace(problem, N=min(64, problem.N))
    leaves, grad = small.inputs()
    leaves = [x.requires_grad_(name != "forward") for x in leaves]
    o = small.function()(*leaves)
    if name != "forward":
        torch.autograd.grad(o, leaves, grad)
    _finish(problem.device)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _start_peak(device: str) -> int:
    """Start a new peak, where the system can, and return the memory in use now."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if sys.platform != "linux":
        return _largest_so_far()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM") if sys.platform == "linux" else _largest_so_far()


def _largest_so_far() -> int:
    # Never reset, so on these systems a peak below an earlier one is read as 0.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
