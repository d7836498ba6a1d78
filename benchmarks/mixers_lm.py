"""Every mixer at equal parameters, tokens and data: bits a byte, speed, memory, decode latency.

    python benchmarks/mixers_lm.py --output runs/mixers

Each run is a process of its own, `linattn train` on the source of Python's standard library; runs
that are finished are not repeated, one that was cut goes on from its checkpoint. The seeds are the
outer loop, so that what is there at any time compares all mixers. Writes mixers.csv, mixers.md and
mixers.png: held-out loss against the speed of training, and against the time of a token decoded.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer

from linattn.generate import latency, load_model
from linattn.models.mixers import MIXERS
from linattn.train.record import whole

CONTEXT = 4096  # tokens in front of the one that is timed


def one_run(mixer: str, seed: int, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Train one model, or go on with it, or read what it came to."""
    summary = folder / "summary.json"
    if summary.exists():
        return json.loads(summary.read_text())
    resume = ["--resume"] if list(folder.glob("checkpoint-*/progress.json")) else []
    names = [word for name in mixer.split("+") for word in ("--mixer", name)]
    command = [sys.executable, "-m", "linattn", "train", "--output", str(folder), *names, *flags]
    command += ["--seed", str(seed), "--sample", "0", *resume]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    run = json.loads((folder / "run.json").read_text())
    (row,) = latency(load_model(folder), [CONTEXT])
    found = {
        "mixer": mixer, "seed": seed, "parameters": run["parameters"], "steps": run["step"],
        "held_out_bits_per_byte": run["held_out_bits_per_byte"],
        "tokens_per_second": run["tokens_per_second"], "peak_MB": usage.ru_maxrss / 1024,
        "decode_ms": 1e3 * row["seconds"], "cache_MB": row["bytes"] / 1e6,
    }  # fmt: skip
    whole(summary, lambda path: path.write_text(json.dumps(found)))
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the means over the seeds as Markdown, the best loss first."""
    lines = [
        "| mixer | parameters | held out [bits/byte] | seeds | training [tokens/s] | peak [MB] "
        f"| a token after {CONTEXT} [ms] | cache [MB] |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mixer in sorted({r["mixer"] for r in rows}, key=lambda m: mean(rows, m)[0]):
        loss, spread, seeds = mean(rows, mixer)
        own = [r for r in rows if r["mixer"] == mixer]
        middle = {k: statistics.median(r[k] for r in own) for k in own[0] if k != "mixer"}
        lines.append(
            f"| {mixer} | {middle['parameters']:,.0f} | {loss:.3f} ± {spread:.3f} | {seeds} | "
            f"{middle['tokens_per_second']:,.0f} | {middle['peak_MB']:,.0f} | "
            f"{middle['decode_ms']:.2f} | {middle['cache_MB']:.3f} |"
        )
    return lines


def mean(rows: list[dict[str, Any]], mixer: str) -> tuple[float, float, int]:
    """Return mean and standard deviation of the held-out loss, and how many seeds."""
    values = [r["held_out_bits_per_byte"] for r in rows if r["mixer"] == mixer]
    return (
        statistics.mean(values),
        statistics.stdev(values) if len(values) > 1 else 0.0,
        len(values),
    )


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss against both speeds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    axes[0].set(xlabel="training [tokens/s]", ylabel="held out [bits/byte]")
    axes[1].set(xlabel=f"a token after {CONTEXT} [ms]", xscale="log")
    for mixer in dict.fromkeys(r["mixer"] for r in rows):
        loss, spread, _ = mean(rows, mixer)
        own = [r for r in rows if r["mixer"] == mixer]
        for axis, key in zip(axes, ("tokens_per_second", "decode_ms"), strict=True):
            x = statistics.median(r[key] for r in own)
            axis.errorbar([x], [loss], [spread], fmt="o", capsize=3)
            axis.annotate(mixer, (x, loss), xytext=(4, 4), textcoords="offset points", fontsize=8)
    whole(path, lambda beside: figure.savefig(beside, dpi=110))
    plt.close(figure)


def main(
    output: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs/mixers"),
    steps: Annotated[int, typer.Option(help="Optimiser steps of a run.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Runs of each mixer.")] = 3,
    mixer: Annotated[
        list[str] | None, typer.Option(help="Default: all, and metala+softmax.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Windows in a batch.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
) -> None:
    """Train every mixer and compare."""
    flags = ["--steps", str(steps), "--rows", str(rows), "--length", str(length)]
    flags += ["--evaluate-every", "0", "--held-out-rows", "128"]
    found: list[dict[str, Any]] = []
    for seed in range(seeds):
        for name in mixer or [*(n for n in MIXERS if n != "convolution"), "metala+softmax"]:
            row = one_run(name, seed, output / f"{name}-{seed}", flags)
            found.append(row)
            print(f"{name} {seed}: {row['held_out_bits_per_byte']:.3f} bits/byte", flush=True)

            def write(path: Path) -> None:
                with path.open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(found[0]))
                    writer.writeheader()
                    writer.writerows(found)

            whole(output / "mixers.csv", write)
            lines = "\n".join(table(found)) + "\n"
            whole(output / "mixers.md", lambda path, lines=lines: path.write_text(lines))
            picture(found, output / "mixers.png")
    print("\n".join(table(found)))


if __name__ == "__main__":
    typer.run(main)
