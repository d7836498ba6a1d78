"""`linattn bench` and `linattn plot`: time and memory against N, D and H."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from linattn.cli.app import app, console, make_folder

if TYPE_CHECKING:
    from linattn.bench import Config, Row


def _shape(text: str) -> tuple[int, int]:
    H, _, D = text.lower().partition("x")
    if not (H.isascii() and H.isdigit() and D.isascii() and D.isdigit()):
        raise typer.BadParameter(f"got {text!r}; expected HxD, as 8x64")
    return int(H), int(D)


@app.command()
def bench(
    length: Annotated[list[int] | None, typer.Option(help="N in tokens; repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="HxD, as 8x64; repeatable.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="linattn, naive, softmax, quadratic; repeatable.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Batch rows.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="0: torch's own choice.")] = 0,
    backend: Annotated[str, typer.Option(help="Of linattn.")] = "auto",
    decay: Annotated[str, typer.Option(help="Of linattn: none, head, token, channel.")] = "none",
    delta: Annotated[bool, typer.Option("--delta", help="The delta rule for linattn.")] = False,
    causal: Annotated[bool, typer.Option(help="Each token sees only earlier ones.")] = True,
    memory_limit: Annotated[float, typer.Option(help="GiB for each case, on a CPU.")] = 3.0,
    time_limit: Annotated[float, typer.Option(help="Seconds for each pass of a case.")] = 60.0,
    keep_memory: Annotated[
        bool, typer.Option(help="Keep freed memory between repeats, on a CPU.")
    ] = True,
    output: Annotated[Path, typer.Option(help="Folder for the CSV and pictures.")] = Path(
        "runs/bench"
    ),
) -> None:
    """Measure time and peak memory against N, D and H, beside the alternatives."""
    from linattn import bench as b

    defaults = b.Config()
    try:
        config = b.Config(
            tuple(method) if method else defaults.methods,
            tuple(_shape(s) for s in shape) if shape else defaults.shapes,
            tuple(length) if length else defaults.lengths,
            batch, dtype, device, threads, backend, decay, delta, causal, memory_limit, time_limit,
            keep_memory=keep_memory,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    finished = run_bench(config, output)
    raise typer.Exit(0 if finished else 130)


def run_bench(config: Config, output: Path) -> bool:
    """Measure with progress and print all there is to see; False if it was interrupted."""
    from linattn import bench as b
    from linattn._interrupts import interrupts

    make_folder("output", output)
    about = b.environment(config)
    busy = _other_load()
    if busy:
        console.print(busy, style="yellow")
    rate = b.matmul_rate(config.dtype, config.device, config.threads)
    console.print(
        f"{about['machine']}, {about['threads']} threads, torch {about['torch']}; "
        f"matmul rate {rate / 1e9:.0f} GFLOP/s in {config.dtype}",
        highlight=False,
    )
    rows: list[b.Row] = []
    finished = True
    try:
        with (
            interrupts(at_once=True) as asked,
            Progress(console=console, transient=True) as progress,
        ):
            task = progress.add_task("measuring", total=len(list(config.problems())))
            for problem, new in b.run(config, rate):
                rows += new
                b.write_csv(rows, about, output / "bench.csv")
                what = f"{problem.method} H={problem.H} D={problem.D} N={problem.N}"
                progress.update(task, advance=1, description=what)
                if asked:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        finished = False
        console.print("interrupted: what was measured is kept", style="yellow")
    if rows:
        _show(rows, output)
        console.print(f"rows: {output / 'bench.csv'}", highlight=False)
    return finished


def _show(rows: list[Row], output: Path) -> None:
    from linattn import _bench_plot
    from linattn.bench import crossover

    console.print(_bench_plot.LEGEND, highlight=False)
    for table in _bench_plot.tables(rows):
        console.print(table)
    for H, D in dict.fromkeys((r.H, r.D) for r in rows):
        console.print(crossover(rows, H, D, "forward+backward"), highlight=False)
    for path in _bench_plot.pictures(rows, output):
        console.print(f"picture: {path}", highlight=False)


def _other_load() -> str:
    """Return a warning if other processes keep the processor busy."""
    import psutil

    load = psutil.cpu_percent(interval=0.3)
    return f"warning: other processes use {load:.0f}% of the processor; times will be off" * (
        load > 25
    )


@app.command()
def plot(
    csv: Annotated[Path, typer.Argument(help="A bench.csv.")],
    output: Annotated[Path | None, typer.Option(help="Folder; default beside the CSV.")] = None,
) -> None:
    """Draw the pictures of a benchmark again from its CSV."""
    from linattn import bench as b

    if not csv.is_file():
        raise typer.BadParameter(f"csv: got {csv}; expected an existing file")
    try:
        rows = b.read_csv(csv)
    except ValueError as error:  # also of bytes that are no text
        raise typer.BadParameter(f"csv: got {csv}; {error}") from None
    folder = csv.parent if output is None else output
    make_folder("output", folder)
    _show(rows, folder)
