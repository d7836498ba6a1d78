"""Ctrl-C that no part of a long run can lose, and that comes where the run can take it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts(at_once: bool = False) -> Iterator[list[int]]:
    """Yield a list that the first Ctrl-C fills, for a loop to look at; a second one stops it.

    Outside of the main thread, which alone gets signals, the list stays empty.

    Args:
        at_once: whether the first one raises KeyboardInterrupt too. Python drops one that comes
            in a destructor or a callback; the list still tells.
    """
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        if at_once or len(asked) > 1:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if main:
        signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
