"""Reading the user's copies of data sets, with errors that say what was looked for."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from linattn._validation import reject


def require_file(path: Path) -> None:
    """Raise unless path is a file."""
    if not path.is_file():
        reject("path", path, "a file")


def require_folder(path: Path, *inside: str) -> None:
    """Raise unless path is a folder that holds these."""
    missing = [name for name in inside if not (path / name).exists()]
    if missing or not path.is_dir():
        reject("path", path, f"a folder with {', '.join(inside)}" if inside else "a folder")


def delimited(path: Path, columns: Sequence[str], delimiter: str) -> Iterator[dict[str, str]]:
    """Return the lines of a file with a header, by column.

    Raises:
        ValueError: no such file, a column that is missing, a line that is cut, no line at all, or
            no text in UTF-8.
    """
    require_file(path)
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a whole article in a field
    number = 1
    with path.open(newline="", encoding="utf-8") as file:
        try:
            reader = csv.DictReader(file, delimiter=delimiter)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                got = f"{path} with the columns {reader.fieldnames}"
                reject("path", got, f"the columns {tuple(columns)}")
            for number, line in enumerate(reader, 2):
                if any(line[name] is None for name in columns):
                    reject("path", f"{path}, line {number}, cut short", f"columns {tuple(columns)}")
                yield line
        except UnicodeDecodeError as error:
            reject("path", f"{path}: {error.reason} at byte {error.start}", "text in UTF-8")
    if number == 1:
        reject("path", f"{path} without a line", "at least one example")
