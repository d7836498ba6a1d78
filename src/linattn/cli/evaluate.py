"""`linattn eval TASK`: train a mixer on a task and score it, softmax attention beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from linattn.cli.app import app, console, make_folder, pairs

if TYPE_CHECKING:
    from linattn.evaluate.sweep import Sweep

eval_app = typer.Typer(no_args_is_help=True, help="Train and score mixers; score models.")
app.add_typer(eval_app, name="eval")

# By name here, so that `linattn --help` need not load torch.
TRAINED = (
    "mqar", "copy", "selective-copying", "induction-heads", "passkey", "listops", "listops-files",
    "digits", "cifar10", "pathfinder", "path-x", "pathfinder-files", "imdb", "aan",
)  # fmt: skip


def _command(task: str) -> Callable[..., None]:
    def command(
        mixer: Annotated[
            list[str] | None,
            typer.Option(help="metala, convolution+metala:key=true, ...; repeatable."),
        ] = None,
        setting: Annotated[str | None, typer.Option(help="A named one of this task.")] = None,
        data: Annotated[
            list[str] | None,
            typer.Option(help="NAME=VALUE,... of the examples; repeatable: several sets."),
        ] = None,
        test: Annotated[
            list[str] | None, typer.Option(help="The same of the sets to score; repeatable.")
        ] = None,
        path: Annotated[Path | None, typer.Option(help="Your folder of the data.")] = None,
        dim: Annotated[list[int] | None, typer.Option(help="hidden_size; repeatable.")] = None,
        learning_rate: Annotated[list[float] | None, typer.Option(help="Repeatable.")] = None,
        seeds: Annotated[int, typer.Option(help="Trials of each.")] = 1,
        change: Annotated[
            list[str] | None,
            typer.Option("--set", help="NAME=VALUE of the model's configuration; repeatable."),
        ] = None,
        examples: Annotated[int | None, typer.Option(help="Of each training set.")] = None,
        test_examples: Annotated[int | None, typer.Option(help="Of each other set.")] = None,
        steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
        rows: Annotated[int | None, typer.Option(help="Examples of a batch.")] = None,
        weight_decay: Annotated[float | None, typer.Option(help="Of AdamW.")] = None,
        schedule: Annotated[
            str | None, typer.Option(help="cosine, linear, constant_with_warmup.")
        ] = None,
        warm_up: Annotated[int | None, typer.Option(help="Steps.")] = None,
        evaluate_every: Annotated[
            int | None, typer.Option(help="Steps between scores and checkpoints.")
        ] = None,
        stop_at: Annotated[
            float | None, typer.Option(help="Stop above this validation accuracy.")
        ] = None,
        seed: Annotated[int | None, typer.Option(help="The first.")] = None,
        jobs: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
        output: Annotated[Path | None, typer.Option(help="Default runs/eval/TASK.")] = None,
    ) -> None:
        from linattn.evaluate import presets, sweep
        from linattn.evaluate.settings import Settings

        given: dict[str, Any] = {
            "path": None if path is None else str(path), "examples": examples,
            "test_examples": test_examples, "steps": steps, "rows": rows, "seed": seed,
            "weight_decay": weight_decay, "schedule": schedule, "warm_up": warm_up,
            "evaluate_every": evaluate_every, "stop_at": stop_at,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        for name, texts in (("train", data), ("test", test)):
            if texts:
                given[name] = tuple(pairs(name, text.split(",")) for text in texts)
        try:
            chosen = {} if setting is None else presets.preset(task, setting)
            softmax = chosen.pop("softmax", {})
            model = {**chosen.pop("model", {}), **pairs("set", change or [])}
            rates = tuple(learning_rate or presets.RATES.get(f"{task}/{setting}", ()))
            planned = sweep.Sweep(
                Settings(task, model=model, **{**chosen, **given}),
                tuple(mixer or ["metala"]),
                tuple(dim or ()), rates, seeds, softmax,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
        _run(planned, output or Path("runs/eval") / task, jobs)

    command.__doc__ = f"Train mixers on {task} and score them, softmax attention beside."
    return command


for _task in TRAINED:
    eval_app.command(_task)(_command(_task))


def _run(planned: Sweep, output: Path, jobs: int) -> None:
    """Run all trials with progress, write and print what they came to."""
    from linattn._interrupts import interrupts
    from linattn.evaluate import pictures, sweep

    make_folder("output", output)
    total = len(planned.trials())
    results: list[sweep.Result] = []
    columns = ("{task.description}", "{task.completed}/{task.total}", "{task.fields[words]}")
    progress = Progress(
        *(TextColumn(text, markup=False) for text in columns[:1]), BarColumn(),
        *(TextColumn(text, markup=False) for text in columns[1:]), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
    steps = planned.settings.steps
    code = 0
    try:
        with interrupts(at_once=True) as asked, progress:
            trials = progress.add_task("trials", total=total, words="")
            inner = progress.add_task("steps", total=steps, words="", visible=jobs == 1)

            def tell(step: int, loss: float, accuracy: float) -> None:
                words = f"loss {loss:.3f}, accuracy {100 * accuracy:.1f} %"
                progress.update(inner, completed=step, words=words)
                if asked:
                    raise KeyboardInterrupt

            for result in sweep.run(planned, output, jobs, tell if jobs == 1 else None):
                results.append(result)
                progress.update(trials, advance=1)
                _tell(result)
                sweep.write(results, output, pictures.accuracy)
                if asked:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from here", style="yellow")
        code = 130
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    except (OSError, RuntimeError) as error:
        console.print(f"ended: {error}", style="red")
        code = 1
    if results:
        rows = sweep.write(results, output, pictures.accuracy)
        shown = Table(*(Column(name, overflow="fold") for name in sweep.columns(rows)))
        for row in sorted(rows, key=lambda r: (r["dim"], -r["tests"][0]["accuracy"])):
            shown.add_row(*sweep.cells(row))
        console.print(shown)
        for name in ("results.json", "results.md", "accuracy.png"):
            console.print(f"written: {output / name}", highlight=False)
    raise typer.Exit(code)


def _tell(result: dict[str, Any]) -> None:
    s = result["settings"]
    words = ", ".join(f"{100 * test['accuracy']:.1f}" for test in result["tests"])
    console.print(
        f"{result['mixer']}, dim {s['model']['hidden_size']}, rate {s['learning_rate']:g}, "
        f"seed {s['seed']}: {words} % after {result['steps']} steps, {result['seconds']:.0f} s",
        highlight=False,
    )
