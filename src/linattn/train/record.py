"""What a training run leaves behind: a log, a picture, a summary; each whole at any moment."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from linattn import __version__
from linattn._validation import reject
from linattn.train.settings import Settings

COLUMNS = ("step", "loss", "bits_per_byte", "held_out_bits", "learning_rate", "gradient_norm",
           "tokens", "seconds")  # fmt: skip
Row = dict[str, float]


def whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have write(path) write a file beside its place, then move it there."""
    beside = path.with_name(f"tmp.{path.name}")
    write(beside)
    beside.replace(path)


class Log:
    """log.csv: one row a step."""

    def __init__(self, folder: Path, step: int):
        """Open the log below folder; rows of step and after, of a run that was cut, go."""
        self.path = folder / "log.csv"
        self.rows = [row for row in read_log(self.path) if row["step"] < step]
        whole(self.path, self._write_all)

    def _write_all(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)

    def picture(self) -> None:
        """Draw loss.png beside the log."""
        figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
        axis.plot([r["step"] + 1 for r in self.rows], [r["bits_per_byte"] for r in self.rows],
                  linewidth=0.8, label="training")  # fmt: skip
        scored = [r for r in self.rows if "held_out_bits" in r]
        axis.plot([r["step"] + 1 for r in scored], [r["held_out_bits"] for r in scored],
                  "o-", label="held out")  # fmt: skip
        axis.set(xlabel="step", ylabel="loss [bits/byte]")
        axis.legend()
        whole(self.path.with_name("loss.png"), lambda path: figure.savefig(path, dpi=110))
        plt.close(figure)


def read_log(path: Path) -> list[Row]:
    """Return the rows of a log.csv, none where there is no such file; a half-written one is left.

    Raises:
        ValueError: a file that is no log.
    """
    if not path.exists():
        return []
    try:
        return _rows(path)
    except ValueError as error:  # also of bytes that are no text
        raise ValueError(f"log: got {path} ({error}); expected what a run wrote") from None


def _rows(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            reject("log", path, f"a CSV with the columns {COLUMNS}")
        for line in reader:
            if line["seconds"]:  # the last column: the row is whole
                row = {name: float(text) for name, text in line.items() if text}
                rows.append({**row, "step": int(row["step"]), "tokens": int(row["tokens"])})
    return rows


def about(settings: Settings, parameters: int, rate: float) -> dict[str, Any]:
    """Return what the results of a run depend on."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "linattn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "matmul_flops_per_second": rate,
        "parameters": parameters,
        "settings": asdict(settings),
    }


def summary(rows: list[Row], step: int, steps: int, flops_of_rate: float) -> dict[str, Any]:
    """Return what a run has come to after `step` of its `steps`.

    flops_of_rate: operations of a token over the machine's rate in a second.
    """
    scored = [row["held_out_bits"] for row in rows if "held_out_bits" in row]
    seconds = rows[-1]["seconds"] if rows else 0.0
    speed = sum(row["tokens"] for row in rows) / seconds if seconds > 0 else None
    return {
        "step": step,
        "finished": step == steps,
        "seconds": seconds,
        "tokens_per_second": speed,
        "model_flops_utilisation": None if speed is None else speed * flops_of_rate,
        "bits_per_byte": rows[-1]["bits_per_byte"] if rows else None,
        "held_out_bits_per_byte": scored[-1] if scored else None,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, whole."""
    whole(path, lambda beside: beside.write_text(json.dumps(value, indent=1)))
