"""The command line: `linattn info | check | bench | train | generate | eval | demo` and more."""

from linattn.cli.app import app, main  # first: it says what is missing

from linattn.cli import accelerate, bench, demo, evaluate, language, machine, scores  # isort: skip

__all__ = [
    "accelerate",
    "app",
    "bench",
    "demo",
    "evaluate",
    "language",
    "machine",
    "main",
    "scores",
]
