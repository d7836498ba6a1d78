"""The application that the commands belong to, and where they print."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

try:
    import typer
    from rich.console import Console
except ImportError as error:  # the package itself needs torch alone
    sys.exit(f"linattn: the command line needs {error.name}: pip install 'linattn[cli]'")

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Linear attention, exact and O(N D) in memory."
)
console = Console(soft_wrap=True, markup=False)  # `[ms]` and `[b]` of a path are text


def main() -> None:
    """Run the command line."""
    app()


def make_folder(name: str, folder: Path) -> None:
    """Make a folder to write to; refuse one that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise typer.BadParameter(f"{name}: got {folder}; {error.strerror}") from None
    if not writable:
        raise typer.BadParameter(f"{name}: got {folder}; expected a folder to write to")


def pairs(name: str, texts: list[str]) -> dict[str, Any]:
    """Return the options of texts NAME=VALUE, values in JSON or else as text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{name}: got {text!r}; expected NAME=VALUE")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found
