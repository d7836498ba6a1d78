"""`linattn train` and `linattn generate`: language models of every mixer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from linattn.cli.app import app, console, make_folder, pairs


@app.command()
def train(
    data: Annotated[
        Path | None, typer.Argument(help="Text file or folder; default: Python's own source.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    mixer: Annotated[
        list[str] | None, typer.Option(help="metala, gla, softmax, ...; repeatable: a hybrid.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Sizes of the model.")] = "bytes-800k",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of the model's configuration; repeatable."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="bytes, or a tokenizer of transformers.")
    ] = "bytes",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 1000,
    rows: Annotated[int, typer.Option(help="Windows of text in a batch.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    accumulation: Annotated[int, typer.Option(help="Batches to a step.")] = 1,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="After the warm-up.")] = 3e-3,
    warm_up: Annotated[int, typer.Option(help="Steps.")] = 50,
    weight_decay: Annotated[float, typer.Option(help="Of projections.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    evaluate_every: Annotated[int, typer.Option(help="Steps; 0: at the end.")] = 250,
    checkpoint_every: Annotated[int, typer.Option(help="Steps.")] = 250,
    held_out_rows: Annotated[int, typer.Option(help="Windows of held-out text.")] = 64,
    seed: Annotated[int, typer.Option(help="Of weights, batches and dropout.")] = 0,
    sample: Annotated[int, typer.Option(help="Tokens of text to write at the end.")] = 200,
) -> None:
    """Train a language model; a run that was cut goes on with --resume."""
    from linattn.generate import generate, printable
    from linattn.models.tokenizers import decode
    from linattn.train import Settings
    from linattn.train import train as run_training

    try:
        settings = Settings(
            None if data is None else str(data), tokenizer, preset, tuple(mixer or ["metala"]),
            pairs("set", change or []), steps, rows, length, accumulation, optimizer, learning_rate,
            warm_up, weight_decay, clip, precision, compiled, evaluate_every, checkpoint_every,
            held_out_rows, seed,
        )  # fmt: skip
        run = run_training(settings, output, resume=resume, console=console)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    except (ArithmeticError, OSError) as error:
        console.print(f"the run has ended: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    found = json.loads((output / "run.json").read_text())
    table = Table("run", str(output))
    for name in ("held_out_bits_per_byte", "bits_per_byte", "tokens_per_second", "seconds"):
        if found[name] is not None:
            table.add_row(name.replace("_", " "), f"{found[name]:,.3f}")
    console.print(table)
    if sample > 0:
        prompt = decode(run.tokenizer, run.held_out.tokens[:32].tolist())
        made = generate(run.model.eval(), run.tokenizer, prompt, sample, seed=seed)
        (output / "sample.txt").write_text(prompt + made.text, encoding="utf-8")
        console.rule("sample, by recurrent decode")
        console.print(printable(prompt + made.text), markup=False, highlight=False)


@app.command()
def generate(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of a model or run; none: first weights.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    tokens: Annotated[int, typer.Option(help="How many to make.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the likeliest.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest drawn from.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    mixer: Annotated[
        list[str] | None, typer.Option(help="Without a model; repeatable with --latency.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Without a model: its sizes.")] = "bytes-800k",
    latency: Annotated[
        Path | None, typer.Option(help="Time a token against the context into this folder.")
    ] = None,
    longest: Annotated[int, typer.Option(help="With --latency: tokens of context.")] = 16384,
) -> None:
    """Write text from a model, token by token; or time that against the context's length."""
    from linattn import generate as g

    names = mixer or ["metala"]
    try:
        if latency is not None:
            _latency(model, preset, names, longest, latency)
            return
        if model is None:
            console.print("no model given: first weights, the text is noise", style="yellow")
        writer, tokenizer = g.load(model) if model else (g.untrained(preset, names[0]), None)
        made = g.generate(
            writer, tokenizer, prompt, tokens, temperature=temperature, top_p=top_p, seed=seed,
            stream=True,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    console.print(f"{made.tokens} tokens, {made.tokens_per_second:,.0f} tokens/s", style="green")


def _latency(model: Path | None, preset: str, names: list[str], longest: int, folder: Path) -> None:
    from linattn import decode_latency
    from linattn import generate as g

    make_folder("latency", folder)
    lengths = decode_latency.lengths(longest)
    if model is None:
        models = {name: partial(g.untrained, preset, name) for name in names}
    else:
        models = {str(model): partial(g.load_model, model)}
    rows: list[dict[str, Any]] = []
    for name, make in models.items():
        with console.status(f"timing {name}"):
            rows += [{"model": name, **row} for row in g.latency(make(), lengths)]
    table = Table("model", "context [tokens]", "a token [ms]", "cache [MB]")
    for row in rows:
        table.add_row(
            row["model"], f"{row['tokens']:,.0f}", f"{1e3 * row['seconds']:.2f}",
            f"{row['bytes'] / 1e6:.2f}",
        )  # fmt: skip
    console.print(table)
    for path in decode_latency.write(rows, folder):
        console.print(f"written: {path}", highlight=False)
