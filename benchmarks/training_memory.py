"""The counted memory of a training step beside the peak of a real one, in one process per mixer.

    python benchmarks/training_memory.py

Prints what `linattn.models.memory` counts for a step beyond weights, gradients and moments, and by
how much the resident memory of a process rose in that step.
"""

import subprocess
import sys
from typing import Annotated

import psutil
import torch
import typer

from linattn.models import LinattnForCausalLM
from linattn.models.memory import training_memory
from linattn.models.mixers import MIXERS
from linattn.models.presets import preset


def measure(mixer: str, rows: int, length: int) -> None:
    """Print the line of one mixer."""
    import resource

    config = preset("pythia-14m", mixer, vocab_size=4096, hidden_size=256)
    model = LinattnForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: torch.Tensor) -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(torch.zeros(rows, 8, dtype=torch.long))  # gradients and moments are there after it
    before = psutil.Process().memory_info().rss
    step(torch.zeros(rows, length, dtype=torch.long))
    rise = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    counted = training_memory(config, length, rows)
    beyond = counted.saved + counted.loss
    print(
        f"| {mixer} | {beyond / 1e6:,.0f} | {rise / 1e6:,.0f} | {rise / beyond:.2f} |", flush=True
    )


def main(
    mixer: Annotated[str | None, typer.Option(help="One only, in this process.")] = None,
    rows: Annotated[int, typer.Option(help="Sequences.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 2048,
) -> None:
    """Measure every mixer, or one."""
    if mixer is not None:
        measure(mixer, rows, length)
        return
    print("| mixer | counted [MB] | measured [MB] | ratio |\n|---|---|---|---|", flush=True)
    for name in MIXERS:
        flags = ["--mixer", name, "--rows", str(rows), "--length", str(length)]
        subprocess.run([sys.executable, __file__, *flags], check=True)


if __name__ == "__main__":
    typer.run(main)
