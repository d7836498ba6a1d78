"""One pass of one case, in a process of its own with a limit on its memory."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
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
    problem: Problem, passed: str, threads: int, memory_limit: int, seconds: float,
    keep_memory: bool, pipe: Connection,
) -> None:  # fmt: skip
    """Send what was measured of the pass "forward" or "forward+backward", or {"error": what}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C does
    torch.set_num_threads(threads)
    if problem.device == "cpu" and sys.platform == "linux":
        # RLIMIT_DATA counts what is really allocated; RLIMIT_AS would count torch's mappings.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    try:
        pipe.send(_measure_pass(problem, passed, seconds, keep_memory))
    except (RuntimeError, MemoryError) as error:
        # torch has no type of its own for a failed allocation on a CPU.
        text = str(error).splitlines()[0] if str(error) else "MemoryError"
        lowered = text.lower()
        memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
            words in lowered
            for words in ("can't allocate memory", "not enough memory", "bad_alloc")
        )
        pipe.send({"error": "out of memory" if memory else text})


def _measure_pass(problem: Problem, name: str, seconds: float, keep_memory: bool) -> dict[str, Any]:
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
    if keep_memory:
        _keep_freed_memory()
        if first < seconds:
            run()
    times: list[float] = []
    while first < seconds and sum(times) < seconds:
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


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed, as the allocators that training on CPUs is run with do.

    It gives tensors past 32 MiB back to the system, and the next call pays for every page again.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large tensor
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


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
