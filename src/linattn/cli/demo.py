"""`linattn demo`: a language model and a short benchmark, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn.cli.app import app, console, make_folder
from linattn.cli.bench import run_bench


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(help="Training time.")] = 1.5,
    output: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("runs/demo"),
) -> None:
    """Train MetaLA on Python's own source, sample from it, run a short bench."""
    from linattn import demo as d
    from linattn.bench import Config

    make_folder("output", output)
    try:
        below = d.run(minutes=minutes, output=output, console=console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    config = Config(
        methods=("linattn", "softmax", "naive"), shapes=((8, 64),), lengths=(512, 2048, 8192),
        memory_limit_gib=6.0, time_limit_s=30.0,
    )  # fmt: skip
    run_bench(config, output)
    console.print(f"loss curve: {output / 'train' / 'loss.png'}", highlight=False)
    raise typer.Exit(0 if below else 1)
