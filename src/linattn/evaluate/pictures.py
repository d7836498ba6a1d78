"""Pictures of the evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

Row = dict[str, Any]


def accuracy(rows: list[Row], task: str, path: Path) -> None:
    """Draw the accuracy of a sweep's rows.

    Against the bytes of state where there are several sizes; against the length where there are
    test sets of several lengths; else a bar for each mixer.
    """
    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    sizes = {row["dim"] for row in rows}
    lengths = [test["data"].get("length") for test in rows[0]["tests"]]
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    for place, mixer in enumerate(mixers):
        own = [row for row in rows if row["mixer"] == mixer]
        for row in own if len(sizes) == 1 else []:
            values = [100 * test["accuracy"] for test in row["tests"]]
            spread = [100 * (test["accuracy_deviation"] or 0) for test in row["tests"]]
            if len(set(lengths)) > 1 and None not in lengths:
                axis.errorbar(lengths, values, spread, fmt="o-", capsize=3, label=mixer)
            else:
                axis.bar([place], values[:1], yerr=spread[:1], capsize=3, label=mixer)
        if len(sizes) > 1:
            x = [row["state_bytes"] or row["parameters"] for row in own]
            y = [100 * row["tests"][0]["accuracy"] for row in own]
            e = [100 * (row["tests"][0]["accuracy_deviation"] or 0) for row in own]
            axis.errorbar(x, y, e, fmt="o-", capsize=3, label=mixer)
    if len(sizes) > 1:
        known = rows[0]["state_bytes"] is not None
        axis.set(xscale="log", xlabel="state [bytes]" if known else "parameters")
    elif len(set(lengths)) > 1 and None not in lengths:
        axis.set(xlabel="length [tokens]")
        axis.set_xscale("log", base=2)
    else:
        axis.set_xticks(range(len(mixers)), mixers, rotation=20)
    axis.set(ylabel="accuracy [%]", ylim=(0, 102), title=task)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def heat_map(
    values: np.ndarray, rows: list[str], columns: list[str], words: dict[str, str], path: Path
) -> None:
    """Draw shares [rows, columns] as colours with numbers; NaN: white.

    words: of "title", "x", "y".
    """
    size = (2.2 + 0.62 * len(columns), 1.4 + 0.38 * len(rows))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    axis.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for i, j in np.ndindex(*values.shape):
        if np.isfinite(values[i, j]):
            axis.text(j, i, f"{100 * values[i, j]:.0f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.set(title=words["title"], xlabel=words["x"], ylabel=words["y"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def maps(drawn: list[tuple[str, np.ndarray]], path: Path) -> None:
    """Draw maps [heads, N, N], a row each: red positive, blue negative, over the row's largest."""
    columns = max(array.shape[0] for _, array in drawn)
    size = (2.6 * columns + 0.6, 2.6 * len(drawn) + 0.4)
    figure, axes = plt.subplots(
        len(drawn), columns, figsize=size, layout="constrained", squeeze=False
    )
    for row, (name, array) in zip(axes, drawn, strict=True):
        for axis in row:
            axis.axis("off")
        for head, axis in zip(array, row, strict=False):
            largest = np.abs(head).max(1, keepdims=True)
            shares = np.divide(head, largest, out=np.zeros_like(head), where=largest > 0)
            axis.imshow(shares, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        row[0].set_title(name, fontsize=8, loc="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)
