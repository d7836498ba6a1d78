"""Pictures of the evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from linattn.evaluate.sweep import labels

Row = dict[str, Any]


def accuracy(rows: list[Row], task: str, path: Path) -> None:
    """Draw the accuracy of a sweep's rows.

    Against the bytes of state where there are several sizes, a panel for each test set; against
    the length where there are test sets of several lengths; else a bar for each mixer.
    """
    sizes = {row["dim"] for row in rows}
    lengths = [test["data"].get("length") for test in rows[0]["tests"]]
    if len(sizes) > 1:
        figure = _against_state(rows)
    elif len(set(lengths)) > 1 and None not in lengths:
        figure = _against_length(rows, lengths)
    else:
        figure = _bars(rows)
    figure.suptitle(task)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _points(row: Row) -> tuple[list[float], list[float]]:
    """Return accuracy and standard deviation in percent of each test set."""
    tests = row["tests"]
    return (
        [100 * test["accuracy"] for test in tests],
        [100 * (test["accuracy_deviation"] or 0) for test in tests],
    )


def _style(place: int) -> dict[str, Any]:
    """Return colour and marker of a line; there are ten colours."""
    return {"color": f"C{place % 10}", "marker": "os^D"[place // 10 % 4], "capsize": 3}


def _axes(panels: int) -> tuple[Figure, list[Axes]]:
    size = (3.9 * panels + 3.2, 4.3)
    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.set(ylim=(0, 102))
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="accuracy [%]")
    return figure, list(axes[0])


def _against_state(rows: list[Row]) -> Figure:
    known = rows[0]["state_bytes"] is not None
    figure, axes = _axes(len(rows[0]["tests"]))
    for panel, (axis, label) in enumerate(zip(axes, labels(rows), strict=True)):
        for place, mixer in enumerate(dict.fromkeys(row["mixer"] for row in rows)):
            own = [row for row in rows if row["mixer"] == mixer]
            x = [row["state_bytes"] if known else row["parameters"] for row in own]
            values, spread = zip(*(_points(row) for row in own), strict=True)
            y, e = ([points[panel] for points in each] for each in (values, spread))
            axis.errorbar(x, y, e, label=mixer, **_style(place))
        axis.set(xscale="log", xlabel="state [bytes]" if known else "parameters", title=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _against_length(rows: list[Row], lengths: list[int]) -> Figure:
    figure, (axis,) = _axes(1)
    for place, row in enumerate(rows):
        axis.errorbar(lengths, *_points(row), label=row["mixer"], **_style(place))
    axis.set(xlabel="length [tokens]")
    axis.set_xscale("log", base=2)
    axis.legend(fontsize=8)
    return figure


def _bars(rows: list[Row]) -> Figure:
    figure, (axis,) = _axes(1)
    for place, row in enumerate(rows):
        values, spread = _points(row)
        axis.bar([place], values[:1], yerr=spread[:1], capsize=3)
    axis.set_xticks(
        range(len(rows)), [row["mixer"] for row in rows], rotation=35, ha="right", fontsize=8
    )
    return figure


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
    axis.set(xlabel=words["x"], ylabel=words["y"])
    axis.set_title(words["title"], fontsize=9)
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
