"""The time of a token against the length of the context, as a CSV and a picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from linattn._validation import require_positive_int
from linattn.train.record import whole


def lengths(longest: int) -> list[int]:
    """Return 16, 64, 256, ... up to longest tokens, longest with them."""
    require_positive_int("longest", longest)
    return sorted({*(4**i for i in range(2, 20) if 4**i < longest), longest})


def write(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write latency.csv and latency.png below folder, whole; return where they are.

    rows: "model", "tokens" of context, "seconds" a token, "bytes" of the cache.
    """
    table, picture = folder / "latency.csv", folder / "latency.png"

    def write_table(path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ("model", "tokens", "seconds", "bytes"))
            writer.writeheader()
            writer.writerows(rows)

    whole(table, write_table)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        x = [row["tokens"] for row in own]
        axes[0].loglog(x, [1e3 * row["seconds"] for row in own], "o-", label=name)
        axes[1].loglog(x, [row["bytes"] / 1e6 for row in own], "o-", label=name)
    axes[0].set(xlabel="context [tokens]", ylabel="one token [ms]")
    axes[1].set(xlabel="context [tokens]", ylabel="cache [MB]")
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)
    whole(picture, lambda path: figure.savefig(path, dpi=110))
    plt.close(figure)
    return [table, picture]
