"""The benchmark's two pictures, time and memory against N, and its table."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
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


def table(rows: list[Row]) -> Table:
    """Return all rows as a table for a terminal."""
    found = Table(
        title="best times; peak: memory the call adds; extra: that beyond its results, over the "
        "bytes of q, k, v, o and their gradients; matmul: FLOP/s over the machine's matmul rate"
    )
    for name in ("shape", "method", "N"):
        found.add_column(name, justify="right" if name == "N" else "left", no_wrap=True)
    for name in ("forward", "fwd+bwd", "peak", "extra", "matmul"):
        found.add_column(name, justify="right", no_wrap=True)
    by_case: dict[tuple[int, int, str, int], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row.H, row.D, row.method, row.N), {})[row.passed] = row
    shape = None
    for (H, D, method, N), passes in by_case.items():
        if shape not in (None, (H, D)):
            found.add_section()
        shape = (H, D)
        both = passes["forward+backward"]
        times = [r.status if r.status != "ok" else _time(r.best_s) for r in passes.values()]
        cells = ["", "", ""]
        if both.status == "ok":
            fraction = "" if both.matmul_fraction != both.matmul_fraction else (
                f"{both.matmul_fraction:.2f}"
            )  # fmt: skip
            cells = [
                f"{both.peak_bytes / 2**20:.0f} MiB",
                f"{both.extra_memory_ratio:.2f}",
                fraction,
            ]
        found.add_row(f"H={H} D={D}", method, str(N), *times, *cells)
    return found


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
