"""The README's numbers: linattn against softmax attention and the naive autograd form, in one run.

    python benchmarks/headline.py --output runs/headline

Writes headline.md (the table), bench.csv (every row, with machine, versions and commit), time.png
and memory.png; ends with status 1 if a claim does not hold here. A few minutes with nothing else
running.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn import _bench_plot, bench
from linattn.bench import Config, Row

H, D = 8, 64
MILLION = 1_000_000
STUDIES = (
    Config(("linattn",), ((H, D),), (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
           repeat_s=3.0),
    Config(("softmax",), ((H, D),), (512, 1024, 2048, 4096, 8192, 16384), time_limit_s=120.0),
    Config(("naive",), ((H, D),), (512, 1024, 2048, 4096), memory_limit_gib=12.0),
    Config(("linattn",), ((1, D),), (MILLION,), memory_limit_gib=12.0, time_limit_s=120.0),
)  # fmt: skip


def claims(rows: list[Row]) -> list[tuple[str, str, str, bool]]:
    """Return (what, measured, claimed, whether it holds), from forward+backward in float32."""
    both = {(r.method, r.H, r.N): r for r in rows if r.passed == "forward+backward"}

    def seconds(method: str, N: int, heads: int = H) -> float:
        row = both.get((method, heads, N))
        return row.best_s if row is not None and row.status == "ok" else math.nan

    lengths = (4096, 16384, 65536)
    long = [r for (method, h, N), r in both.items() if (method, h) == ("linattn", H) and N >= 4096]
    to_softmax = seconds("softmax", 16384) / seconds("linattn", 16384)
    to_naive = seconds("naive", 4096) / seconds("linattn", 4096)
    slope = bench.slope(long)
    extra = [r.extra_memory_ratio for r in long]
    million = both["linattn", 1, MILLION]
    ratios = ", ".join(f"{both['linattn', H, N].extra_memory_ratio:.2f}" for N in lengths)
    return [
        ("time of softmax attention / linattn, N=16384", f"{to_softmax:.1f}", ">= 8",
         to_softmax >= 8),
        ("time of the naive autograd form / linattn, N=4096", f"{to_naive:.1f}", ">= 3",
         to_naive >= 3),
        ("slope of log time against log N, N=4096 to 65536", f"{slope:.2f}", "1.0 +- 0.1",
         0.9 <= slope <= 1.1),
        ("extra memory / (q, k, v, o and gradients), N=4096, 16384, 65536", ratios, "<= 1.0",
         max(extra) <= 1.0),
        ("1,000,000 tokens, H=1 D=64",
         f"{million.best_s:.1f} s, {million.peak_bytes / 2**30:.2f} GiB", "trains a step",
         million.status == "ok"),
    ]  # fmt: skip


def main(
    output: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path(
        "runs/headline"
    ),
) -> None:
    """Measure, print the table, and say whether each claim holds."""
    console = Console(soft_wrap=True)
    output.mkdir(parents=True, exist_ok=True)
    about = bench.environment(STUDIES[0])
    rate = bench.matmul_rate("float32", "cpu")
    rows: list[Row] = []
    for study in STUDIES:
        for problem, new in bench.run(study, rate):
            rows += new
            bench.write_csv(rows, about, output / "bench.csv")
            console.print(problem.method, f"H={problem.H} N={problem.N}", new[-1].status)
    _bench_plot.pictures([r for r in rows if r.H == H], output)
    fractions = [
        r.matmul_fraction for r in rows if (r.method, r.H, r.passed) == ("linattn", H, bench.BOTH)
    ]
    found = claims(rows)
    lines = [
        f"{about['date']}, {about['machine']}, {about['threads']} threads, torch "
        f"{about['torch']}, commit {about['commit']}; forward and backward, float32, H={H} D={D}. "
        f"Matmul rate of the machine {rate / 1e9:.0f} GFLOP/s, of which linattn reaches "
        f"{min(fractions):.2f} to {max(fractions):.2f}.",
        "",
        "| what | measured | claimed | holds |",
        "|---|---|---|---|",
        *(
            f"| {what} | {got} | {claim} | {'yes' if ok else 'NO'} |"
            for what, got, claim, ok in found
        ),
        "",
        bench.crossover(rows, H, D, bench.BOTH),
    ]
    (output / "headline.md").write_text("\n".join(lines) + "\n")
    console.print("\n".join(lines), markup=False, highlight=False)
    raise typer.Exit(0 if all(ok for *_, ok in found) else 1)


if __name__ == "__main__":
    typer.run(main)
