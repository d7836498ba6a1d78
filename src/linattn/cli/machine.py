"""`linattn info` and `linattn check`: what this machine has, and whether it computes rightly."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from linattn.cli.app import app, console


@app.command()
def info(
    family: Annotated[
        bool, typer.Option("--family", help="Print MetaLA's table of the layers, in Markdown.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a training step of this preset, by its name.")
    ] = None,
    mixer: Annotated[list[str] | None, typer.Option(help="With --memory; repeatable.")] = None,
    length: Annotated[int, typer.Option(help="With --memory: tokens of a row.")] = 2048,
    rows: Annotated[int, typer.Option(help="With --memory: rows.")] = 1,
) -> None:
    """Show versions, devices and backends, and why each is on or off."""
    if memory is not None:
        show_memory(memory, mixer or ["metala"], length, rows)
        return
    if family:
        from linattn.layers.family import table as family_table

        print(family_table())
        return
    import platform

    import torch

    from linattn import __version__, backends
    from linattn.bench import machine

    versions = {"linattn": __version__, "torch": torch.__version__}
    versions["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    versions["processor"] = f"{machine()}, {torch.get_num_threads()} threads in torch"
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    versions["GPU"] = cuda
    for name, text in versions.items():
        console.print(f"{name:10} {text}", highlight=False)
    table = Table("backend", "", "why")
    for backend in backends().values():
        table.add_row(backend.name, "on" if backend.available else "off", backend.reason)
    console.print(table)


@app.command()
def check() -> None:
    """Compare every available backend with the reference on this machine."""
    from linattn import check as checks
    from linattn.testing import TOLERANCE

    found: dict[tuple[str, str], list[str]] = {}
    wrong: list[str] = []
    with console.status("comparing values, states and gradients"):
        for result in checks.run():
            found.setdefault((result.backend, result.kind), []).append(
                "wrong" if result.wrong else "ok"
            )
            name = f"{result.backend}, {result.kind}, {result.dtype}"
            wrong += [f"{name}: {line}" for line in result.wrong]
    table = Table("backend", "kind", *(f"{str(d)[6:]} ({t:g})" for d, t in TOLERANCE.items()))
    for key, cells in found.items():
        table.add_row(*key, *cells)
    console.print(table)
    for line in wrong:
        console.print(line, style="red")
    raise typer.Exit(1 if wrong else 0)


def show_memory(name: str, mixer: list[str], length: int, rows: int) -> None:
    """Print what a training step of a preset takes, and what the published formula says."""
    from linattn.models.memory import published_memory, training_memory
    from linattn.models.presets import preset

    try:
        config = preset(name, mixer[0] if len(mixer) == 1 else mixer)
        counted = training_memory(config, length, rows)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    table = Table(f"{name}, {rows} x {length} tokens, float32, AdamW", "GB", title="training step")
    for part in ("weights", "gradients", "optimizer", "saved", "loss"):
        table.add_row(MEANING[part], f"{getattr(counted, part) / 1e9:.2f}")
    table.add_row("together", f"{counted.total / 1e9:.2f}", style="bold")
    heads = config.num_attention_heads
    D = config.hidden_size // heads
    formula = published_memory(counted.parameters, config.num_hidden_layers, heads, D, length, rows)
    table.add_row("published formula, 12 K + 60 L H D N", f"{formula / 1e9:.2f}")
    console.print(f"{counted.parameters:,} parameters", highlight=False)
    console.print(table)


MEANING = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "moments of AdamW",
    "saved": "kept by the forward pass for the backward pass",
    "loss": "gradient of the logits and its copy",
}
