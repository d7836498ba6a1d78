"""The stand-in for dropout: none, dropout, the stand-in, on a text that can be learned off.

    python benchmarks/dropout.py --output runs/dropout

A model of affine linear attention sees the same twenty kilobytes again and again and is scored on
as many of other files; the noise is on the output of the attention, before the heads are merged,
where the paper has it. Writes dropout.csv, and dropout.md with the mean and standard deviation over
seeds of training and held-out loss, at the end and at its best, and the time of a step beside that
without noise, steps of the kinds in turn, medians.
"""

import csv
import math
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from linattn.tasks import language
from linattn.train import Run, Settings
from linattn.train.record import whole

SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
NOISE = {
    "none": {},
    "dropout 0.1": {"dropout": 0.1, "dropout_mode": "output"},
    "dropout 0.3": {"dropout": 0.3, "dropout_mode": "output"},
    "stand-in 0.1": {"dropout": 0.1},
    "stand-in 0.3": {"dropout": 0.3},
    "stand-in 0.5": {"dropout": 0.5},
}


def settings(text: Path, noise: str, steps: int, seed: int) -> Settings:
    """Return a run with one kind of noise."""
    options = {"linear": NOISE[noise]}
    return Settings(
        str(text), mixer=("linear",), changes={**SIZES, "mixer_options": options}, steps=steps,
        rows=4, length=256, warm_up=20, learning_rate=3e-3, held_out_rows=64, seed=seed,
    )  # fmt: skip


def pieces(size: int) -> list[bytes]:
    """Return nineteen texts of `size` bytes in all, and a twentieth as long as all of them."""
    train, held_out = (
        bytes(corpus.tokens[:size].tolist()).decode(errors="ignore").encode()
        for corpus in language.load(None, None)
    )
    step = -(-len(train) // 19)
    cut = [train[i : i + step] for i in range(0, len(train), step)]
    return [*cut, held_out]


@torch.no_grad()
def train_bits(run: Run) -> float:
    """Return bits a byte of the text it was trained on, without noise."""
    run.model.eval()
    batch = language.spread(run.text, 32, run.settings.length)
    return run.loss(batch, batch.scored).item() / math.log(2)


def overhead(text: Path, repeats: int) -> dict[str, float]:
    """Return the time of a step over that without noise, for every kind."""
    runs = {noise: Run(settings(text, noise, 1000, 0)) for noise in NOISE}
    times: dict[str, list[float]] = {noise: [] for noise in NOISE}
    for repeat in range(repeats + 3):
        for noise, run in runs.items():
            start = time.perf_counter()
            run.train_step()
            if repeat >= 3:
                times[noise].append(time.perf_counter() - start)
    middle = {noise: statistics.median(values) for noise, values in times.items()}
    return {noise: value / middle["none"] for noise, value in middle.items()}


def main(
    output: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("runs/dropout"),
    steps: Annotated[int, typer.Option(help="Optimiser steps of a run.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    kilobytes: Annotated[int, typer.Option(help="Of text to train on, and to score.")] = 20,
) -> None:
    """Train with each kind of noise and compare."""
    output.mkdir(parents=True, exist_ok=True)
    text = output / "text"  # a folder: its twentieth file is held out
    text.mkdir(exist_ok=True)
    for number, words in enumerate(pieces(1000 * kilobytes)):
        (text / f"{number:02}.txt").write_bytes(words)
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        for noise in NOISE:
            run = Run(settings(text, noise, steps, seed))
            best = math.inf
            while run.step < steps:
                run.train_step()
                if run.step % 50 == 0:
                    best = min(best, run.score())
            row = {"noise": noise, "seed": seed, "train": train_bits(run),
                   "held_out": run.score(), "best_held_out": best}  # fmt: skip
            rows.append(row)
            print(row, flush=True)

            def write(path: Path) -> None:
                with path.open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(rows[0]))
                    writer.writeheader()
                    writer.writerows(rows)

            whole(output / "dropout.csv", write)
    ratio = overhead(text, 30)
    names = ("train", "held_out", "best_held_out")
    lines = [
        "| noise | training text [bits/byte] | held out, at the end | held out, at its best "
        "| time of a step |",
        "|---|---|---|---|---|",
    ]
    for noise in NOISE:
        cells = []
        for name in names:
            values = [row[name] for row in rows if row["noise"] == noise]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.3f} ± {spread:.3f}")
        lines.append(f"| {noise} | {' | '.join(cells)} | {100 * (ratio[noise] - 1):+.1f} % |")
    whole(output / "dropout.md", lambda path: path.write_text("\n".join(lines) + "\n"))
    print("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
