"""The command line: `linattn info | check | bench | plot | train | generate | demo`."""

from linattn.cli.app import app, main  # first: it says what is missing

from linattn.cli import bench, demo, language, machine  # isort: skip

__all__ = ["app", "bench", "demo", "language", "machine", "main"]
