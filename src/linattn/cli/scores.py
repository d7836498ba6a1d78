"""`linattn eval perplexity | recall | map | lm-eval` of saved models, and `linattn report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from linattn.cli.app import app, console, make_folder
from linattn.cli.evaluate import eval_app

Models = Annotated[list[Path], typer.Argument(help="Folders of saved models, runs or trials.")]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _teller(status: Any, path: Path) -> Callable[[int, int], None]:
    return lambda done, of: status.update(f"{path}: {done}/{of} windows")


def _write(kind: str, output: Path, content: dict[str, Any], words: list[str]) -> None:
    """Write a result and print where; words: its pictures."""
    from linattn.evaluate.trial import about, without_nan
    from linattn.train.record import write_json

    write_json(output / f"{kind}.json", without_nan({"kind": kind, **content, **about()}))
    for path in (output / f"{kind}.json", *(output / word for word in words)):
        console.print(f"written: {path}", highlight=False)


@eval_app.command()
def perplexity(
    model: Models,
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder; default: Python's own source.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between two windows; default: context.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Windows at a time.")] = 8,
    documents: Annotated[int, typer.Option(help="Held-out documents to score; 0: all.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("runs/eval/perplexity"),
) -> None:
    """Score the held-out part of a text: perplexity and bits per byte."""
    from linattn.evaluate import models
    from linattn.evaluate import perplexity as p
    from linattn.models.tokenizers import byte_tokenizer, encoder
    from linattn.tasks import language

    make_folder("output", output)
    table = Table("model", "perplexity", "bits/byte", "context", "stride", "tokens")
    found = []
    with _refusals(), console.status("reading") as status:
        for path in model:
            scored, tokenizer = models.load(path)
            known = tokenizer.get_vocab() == byte_tokenizer().get_vocab()  # bytes: at once
            _, text = language.load(data, encoder("bytes" if known else "", tokenizer))
            if documents < 0:
                raise ValueError(f"documents: got {documents}; expected an int >= 0")
            if documents > 0:
                text = text.first(documents)
            result = p.perplexity(scored, text, context=context, stride=stride, rows=rows,
                                  tell=_teller(status, path))  # fmt: skip
            row = {"model": str(path), "perplexity": result.perplexity,
                   "bits_per_byte": result.bits_per_byte, **asdict(result)}  # fmt: skip
            found.append(row)
            table.add_row(
                str(path), f"{result.perplexity:.3f}", f"{result.bits_per_byte:.4f}",
                str(context), str(result.stride), f"{result.tokens:,}",
            )  # fmt: skip
    console.print(table)
    _write("perplexity", output, {"data": str(data), "rows": found}, [])


@eval_app.command()
def recall(
    model: Annotated[Path, typer.Argument(help="Folder of a language model, run or trial.")],
    kind: Annotated[
        str, typer.Option(help="passkey, short-passkey, phonebook, needle-single_1, ...")
    ] = "passkey",
    length: Annotated[
        list[int] | None, typer.Option(help="Characters (phone book: entries); repeatable.")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option(help="0: the beginning, to 1; repeatable.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Texts of a length and depth.")] = 20,
    generated: Annotated[
        int, typer.Option(help="Tokens to generate and look into; 0: compare token by token.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("runs/eval/recall"),
) -> None:
    """Find again what stands in a long text: a heat map over length and depth."""
    from linattn.evaluate import models, pictures
    from linattn.evaluate import recall as r
    from linattn.train.record import whole

    make_folder("output", output)
    lengths = length or ([10, 20, 50, 100] if kind == "phonebook" else [250, 500, 1000, 2000])
    depths = depth or [0.0, 0.25, 0.5, 0.75, 1.0]
    with _refusals(), console.status("reading") as status:
        judged, tokenizer = models.load(model)
        cells = r.grid(
            judged, tokenizer, kind, lengths, depths, trials=trials, generated=generated,
            seed=seed, tell=lambda cell: status.update(f"length {cell.length} at {cell.depth}"),
        )  # fmt: skip
    values, across, down = r.table(cells)
    names = ["anywhere" if d is None else f"{d:g}" for d in down]
    table = Table(f"{kind}, exact [%]: depth", *map(str, across))
    for name, row in zip(names, values, strict=True):
        table.add_row(name, *(f"{100 * value:.0f}" for value in row))
    console.print(table)
    words = {"title": f"{kind}, exact [%]\n{model.name}", "x": "length", "y": "depth"}
    whole(output / "recall.png", lambda path: pictures.heat_map(
        values, names, [str(n) for n in across], words, path))  # fmt: skip
    content = {"name": f"{kind}, {model}", "model": str(model), "task": kind,
               "trials": trials, "generated": generated, "cells": r.rows(cells)}  # fmt: skip
    _write("recall", output, content, ["recall.png"])


@eval_app.command("map")
def attention_map(
    model: Annotated[
        list[Path] | None, typer.Argument(help="Folders of saved models, runs or trials.")
    ] = None,
    mixer: Annotated[
        list[str] | None, typer.Option(help="Without a model: first weights; repeatable.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Without a model: its sizes.")] = "bytes-800k",
    text: Annotated[
        Path | None, typer.Option(help="Of a language model; default: a module of Python.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read.")] = 128,
    base: Annotated[float, typer.Option(help="Of the entropy's logarithm.")] = 2.718281828459045,
    picture: Annotated[bool, typer.Option(help="Draw the maps: tokens^2 numbers.")] = True,
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("runs/eval/map"),
) -> None:
    """Show the implicit attention maps of models, and how concentrated they are."""
    from linattn.evaluate import attention_map as a
    from linattn.evaluate import pictures
    from linattn.evaluate.concentration import concentration
    from linattn.evaluate.inputs import models_and_inputs
    from linattn.train.record import whole

    make_folder("output", output)
    names = ("model", "map", "head", "entropy", "of the largest", "gap", "singular", "clipped")
    table = Table(*(Column(name, overflow="fold") for name in names))
    found, drawn = [], []
    with _refusals(), console.status("reading"):
        given = models_and_inputs(model or [], mixer or ["metala", "softmax"], preset, text, tokens)
        for name, judged, inputs in given:
            for attention in a.record(judged, inputs):
                c = asdict(concentration(attention, base=base))
                for head in range(attention.heads):
                    row = {key: values[head] for key, values in c.items()}
                    found.append({"model": name, "map": attention.name, "head": head, **row})
                    shown = (row["entropy"], row["relative_entropy"], row["spectral_gap"],
                             row["singular_value"], row["clipped"])  # fmt: skip
                    table.add_row(name, attention.name, str(head), *(f"{x:.3f}" for x in shown))
                if picture:
                    drawn.append((f"{name}\n{attention.name}", a.whole(attention).numpy()))
    console.print(table)
    if picture:
        whole(output / "map.png", lambda path: pictures.maps(drawn, path))
    content = {"base": base, "tokens": tokens, "rows": found}
    _write("concentration", output, content, ["map.png"] if picture else [])


@eval_app.command("lm-eval")
def lm_eval(
    model: Annotated[Path, typer.Argument(help="Folder of a language model, run or trial.")],
    task: Annotated[list[str], typer.Option(help="Name of lm-eval's; repeatable.")],
    include: Annotated[Path | None, typer.Option(help="Folder of your own task files.")] = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task.")] = None,
    shots: Annotated[int | None, typer.Option(help="Examples in front of each.")] = None,
    rows: Annotated[int, typer.Option(help="Of a batch.")] = 8,
    output: Annotated[Path, typer.Option(help="Folder.")] = Path("runs/eval/lm-eval"),
) -> None:
    """Score a model on tasks of the lm-eval harness."""
    from linattn.evaluate.harness import harness

    make_folder("output", output)
    with _refusals():
        found = harness(model, task, include=include, limit=limit, shots=shots, rows=rows)
    table = Table("task", "metric", "value", "standard error")
    for row in found:
        error = row["error"]
        shown = f"{error:.4f}" if isinstance(error, float) else ""
        table.add_row(row["task"], row["metric"], f"{row['value']:.4f}", shown)
    console.print(table)
    _write("lm-eval", output, {"name": str(model), "model": str(model), "rows": found}, [])


@app.command()
def report(
    folder: Annotated[list[Path], typer.Argument(help="Folders with results below them.")],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("runs/report.md"),
    title: Annotated[str, typer.Option(help="Of the page.")] = "Evaluations",
) -> None:
    """Collect the results of evaluations and training runs into one Markdown page."""
    from linattn.evaluate.report import report as write_report

    make_folder("output", output.parent)
    with _refusals():
        found = write_report(folder, output, title)
    console.print(f"{len(found)} results: {output}", highlight=False)
