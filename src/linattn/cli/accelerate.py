"""`linattn accelerate-report`: a model of transformers before and after `accelerate`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from linattn.cli.app import app, console


@app.command()
def accelerate_report(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder that save_pretrained wrote, or mamba-100m, mamba2-100m, qwen3.5-100m "
            "or kimi-linear-100m: random weights."
        ),
    ],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    tokens: Annotated[int, typer.Option(help="Of prefill and of a training step.")] = 512,
    decoded: Annotated[int, typer.Option(help="Tokens decoded one by one behind them.")] = 16,
    repeats: Annotated[int, typer.Option(help="The best of so many counts.")] = 3,
    training: Annotated[bool, typer.Option(help="Time a training step too.")] = True,
) -> None:
    """Compare tokens a second and logits of a model of transformers with and without linattn."""
    try:
        import torch
        from transformers.utils import logging
    except ImportError as error:
        raise typer.BadParameter(f"it needs {error.name}: pip install transformers") from None
    from linattn.bench import machine
    from linattn.integrations import report

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise typer.BadParameter(f"dtype: got {dtype!r}; expected one of {tuple(dtypes)}")
    logging.set_verbosity_error()
    try:
        loaded = report.load(model, dtypes[dtype])
        rows, difference = report.measure(
            loaded, tokens=tokens, decoded=decoded, repeats=repeats, training=training
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    size = sum(p.numel() for p in loaded.parameters())
    console.print(
        f"{model}: {size / 1e6:.1f} M parameters, {dtype}, {tokens} tokens; {machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}",
        highlight=False,
    )
    table = Table("tokens a second", "before", "after", "ratio")
    for row in rows:
        ratio = f"{row.after / row.before:.1f}x"
        table.add_row(row.work, f"{row.before:.1f}", f"{row.after:.1f}", ratio)
    console.print(table)
    console.print(f"largest difference of a logit: {difference:.2g}", highlight=False)
