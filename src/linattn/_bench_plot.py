"""The benchmark's two pictures, time and memory against N, and its table."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich import box
from rich.table import Table

from linattn.bench import Row, slope

COLOURS = {"linattn": "C0", "naive": "C1", "softmax": "C2", "quadratic": "C3"}
LINES = {"forward": "--", "forward+backward": "-"}


def pictures(rows: list[Row], folder: Path) -> list[Path]:
    """Draw time.png and memory.png in folder and return their paths."""
    return [
        _picture(rows, "best_s", "time [s]", folder / "time.png"),
        _picture(rows, "peak_bytes", "peak memory of the call [bytes]", folder / "memory.png"),
    ]


def _picture(rows: list[Row], value: str, label: str, path: Path) -> Path:
    shapes = list(dict.fromkeys((r.H, r.D) for r in rows))
    columns = min(len(shapes), 2)
    lines = -(-len(shapes) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6.5 * columns, 4.6 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(shapes) :]:
        axis.set_visible(False)
    for axis, (H, D) in zip(axes.flat, shapes, strict=False):
        for method, colour in COLOURS.items():
            for passed, style in LINES.items():
                mine = [
                    r for r in rows
                    if (r.method, r.passed, r.H, r.D, r.status) == (method, passed, H, D, "ok")
                    and getattr(r, value) > 0
                ]  # fmt: skip
                if mine:
                    x, y = [r.N for r in mine], [getattr(r, value) for r in mine]
                    name = f"{method} {passed}, slope {slope(mine, value):.2f}"
                    axis.plot(x, y, style, color=colour, marker="o", markersize=3, label=name)
        axis.set(
            xscale="log", yscale="log", xlabel="N [tokens]", ylabel=label, title=f"H={H} D={D}"
        )
        axis.grid(alpha=0.3, which="both")
        if axis.lines:
            axis.legend(fontsize=7)
    beside = path.with_name(f"{path.stem}.tmp.png")
    figure.savefig(beside, dpi=110)
    plt.close(figure)
    beside.replace(path)
    return path


LEGEND = (
    "best times; peak: memory that forward+backward adds; extra: that beyond its results, over the "
    "bytes of q, k, v, o and their gradients; matmul: FLOP/s over the machine's own matmul rate"
)


def tables(rows: list[Row]) -> list[Table]:
    """Return one table a shape, for a terminal of 80 columns."""
    return [
        _table([r for r in rows if shape == (r.H, r.D)], f"H={shape[0]} D={shape[1]}")
        for shape in dict.fromkeys((r.H, r.D) for r in rows)
    ]


def _table(rows: list[Row], title: str) -> Table:
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("method", "N", "forward", "forward+backward", "peak", "extra", "matmul"):
        found.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    by_case: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row.method, row.N), {})[row.passed] = row
    method_before = None
    for (method, N), passes in by_case.items():
        if method_before not in (None, method):
            found.add_section()
        method_before = method
        # A file that was cut off may lack the second of a pair.
        forward, both = (passes.get(passed) for passed in LINES)
        # The reason of a skipped case stands in the CSV and in the row above.
        times = [
            "" if r is None else _time(r.best_s) if r.status == "ok" else r.status.partition(":")[0]
            for r in (forward, both)
        ]
        cells = ["", "", ""]
        if both is not None and both.status == "ok":
            fraction = both.matmul_fraction
            cells = [
                f"{both.peak_bytes / 2**20:.0f} MiB",
                f"{both.extra_memory_ratio:.2f}",
                "" if math.isnan(fraction) else f"{fraction:.2f}",
            ]
        found.add_row(method, str(N), *times, *cells)
    return found


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
