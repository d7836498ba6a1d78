"""A pass of the benchmark in a process of its own, as its parent sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from linattn._bench_methods import Problem
from linattn._bench_worker import measure


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C for later: processes started here are born with it blocked.

    They ignore it, but a terminal sends it to them as well, and it may come before they can say so.
    """
    if os.name != "posix":
        yield
        return
    resource_tracker.ensure_running()  # else starting the worker starts it, which lifts the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def one_pass(
    problem: Problem, passed: str, threads: int, memory_limit_gib: float, time_limit_s: float,
    repeat_s: float, keep_memory: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return what a process of its own measures, or {"error": what went wrong}."""
    context: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    if os.name == "posix":
        context.set_forkserver_preload(["torch", "linattn._bench_worker"])
    receive, send = context.Pipe(duplex=False)
    options = (threads, int(memory_limit_gib * 2**30), repeat_s, keep_memory, send)
    worker = context.Process(target=measure, args=(problem, passed, *options), daemon=True)
    with _interrupts_held():
        worker.start()
    send.close()
    try:
        if not receive.poll(time_limit_s):
            return {"error": f"over {time_limit_s:g} s"}
        message: dict[str, Any] = receive.recv()
        return message
    except EOFError:
        return {"error": "killed"}  # without a word: the system's own memory limit, most likely
    finally:
        worker.kill()
        worker.join()
