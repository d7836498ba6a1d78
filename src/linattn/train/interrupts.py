"""Ctrl-C between two steps of a loop, not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list that the first Ctrl-C fills, for the loop to look at; a second one stops it.

    Outside of the main thread, which alone gets signals, the list stays empty.
    """
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    main = threading.current_thread() is threading.main_thread()
    if main:
        signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
