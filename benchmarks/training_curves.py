"""Does training with the kernels follow the naive autograd form? Loss curves, same seed.

    python benchmarks/training_curves.py --output runs/curves

The naive form is `backend="reference"`: the token loop whose graph autograd keeps, a state for
every token. Text, batches, first weights and dropout are the same. Then the same model under
autocast in bfloat16, and in float16 with a gradient scaler. The model in float64 tells how far
each float32 curve, the naive one too, is from exact arithmetic. Writes curves.csv and curves.png,
and prints for every run the largest relative difference from the naive curve and from float64.
"""

import csv
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer
from rich.console import Console
from rich.table import Table

from linattn.train import Run, Settings
from linattn.train.record import whole

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
EXACT, NAIVE = "chunked, float64", "naive autograd, float32"
RUNS = {
    EXACT: ("chunked", "float64"),
    NAIVE: ("reference", "float32"),
    "kernels, float32": ("auto", "float32"),
    "chunked, float32": ("chunked", "float32"),
    "kernels, bfloat16": ("auto", "bfloat16"),
    "kernels, float16 and scaler": ("auto", "float16"),
}


def curve(mixer: str, backend: str, precision: str, steps: int, seed: int) -> list[float]:
    """Return the losses of the steps, in nats a byte."""
    options = {mixer: {"backend": backend}}
    if mixer == "linear":  # the stand-in for dropout is part of the published layer
        options[mixer]["dropout"] = 0.1
    double = precision == "float64"
    run = Run(
        Settings(
            mixer=(mixer,), changes={**SIZES, "mixer_options": options}, steps=steps, rows=4,
            length=64, warm_up=10, learning_rate=3e-3, seed=seed,
            precision="float32" if double else precision,
        )
    )  # fmt: skip
    if double:
        run.model.double()
    return [run.train_step()[0] for _ in range(steps)]


def main(
    output: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("runs/curves"),
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 100,
    seed: Annotated[int, typer.Option(help="Of weights, batches and noise.")] = 0,
) -> None:
    """Train each way and compare."""
    output.mkdir(parents=True, exist_ok=True)
    table = Table("mixer", "run", "last loss", "from naive", "at half", "from float64", "at half")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    rows = []
    for axis, mixer in zip(axes, ("linear", "metala"), strict=True):
        # The noise of the stand-in is drawn in the dtype of the model: other noise in float64.
        names = [name for name in RUNS if mixer == "metala" or name != EXACT]
        curves = {name: curve(mixer, *RUNS[name], steps, seed) for name in names}
        for name, losses in curves.items():
            cells = []
            for against in (curves[name] for name in (NAIVE, EXACT) if name in curves):
                away = [abs(a - b) / b for a, b in zip(losses, against, strict=True)]
                cells += [f"{max(away):.1e}", f"{max(away[: steps // 2]):.1e}"]
            table.add_row(mixer, name, f"{losses[-1]:.4f}", *cells)
            rows += [(mixer, name, i, loss) for i, loss in enumerate(losses)]
            axis.plot(losses, label=name, linewidth=1)
        axis.set(title=mixer, xlabel="step", ylabel="loss [nats/byte]")
        axis.legend(fontsize=7)

    def write(path: Path) -> None:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("mixer", "run", "step", "loss"), *rows])

    whole(output / "curves.csv", write)
    whole(output / "curves.png", lambda path: figure.savefig(path, dpi=110))
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
