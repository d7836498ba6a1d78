"""`linattn demo`: train a small language model on Python's own source for a minute or two.

Then sample from it by recurrent decode, and say whether it beats the byte-bigram entropy.
"""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from safetensors.torch import save_file

from linattn import __version__
from linattn._validation import reject
from linattn.models.byte_language_model import ByteLanguageModel, Configuration
from linattn.tasks import standard_library

PROMPT = b"def "


@dataclass
class Result:
    """What a run has found so far."""

    steps: int = 0
    tokens_per_second: float = 0.0
    held_out_bits: float = math.nan
    bigram_bits: float = math.nan
    decode_tokens_per_second: float = 0.0
    sample: str = ""
    losses: list[float] = field(default_factory=list)  # bits a byte, one a step


def run(
    minutes: float = 1.5,
    output: Path = Path("runs/demo"),
    console: Console | None = None,
    configuration: Configuration | None = None,
    rows: int = 4,
    length: int = 512,
    seed: int = 0,
) -> bool:
    """Train for `minutes`, sample, write model, run.json and loss.png to `output`.

    Returns:
        Whether the held-out loss is below the byte-bigram entropy of the same held-out text.

    Raises:
        ValueError: minutes is not > 0.
    """
    if not minutes > 0:
        reject("minutes", minutes, "a number > 0")
    console = Console() if console is None else console
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    corpus = standard_library.load()
    held_out = corpus.held_out[: 64 * (length + 1)]
    result = Result(bigram_bits=standard_library.bigram_entropy(held_out))
    model = ByteLanguageModel(configuration)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{corpus.train.numel() / 1e6:.1f} MB of Python's standard library, "
        f"{parameters / 1e6:.2f} M parameters, {minutes:g} minutes",
        highlight=False,
    )
    try:
        _train(model, corpus.train, 60 * minutes, rows, length, seed, result, console)
    except KeyboardInterrupt:
        console.print("interrupted: going on with what was learned", style="yellow")
    model.eval()
    result.held_out_bits = _score(model, held_out, length)
    _sample(model, result, console)
    _write(model, result, output, seed)
    _report(result, console)
    return result.held_out_bits < result.bigram_bits


def _train(
    model: ByteLanguageModel, text: torch.Tensor, seconds: float, rows: int, length: int,
    seed: int, result: Result, console: Console,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    start = time.monotonic()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=seconds, left="")
        while (spent := time.monotonic() - start) < seconds or result.steps == 0:
            # Warm up over 20 steps, then down to a tenth along a cosine of the time that is left.
            warm = min(1.0, (result.steps + 1) / 20)
            cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, spent / seconds))
            optimizer.param_groups[0]["lr"] = 3e-3 * warm * cosine
            loss = model.loss(standard_library.batch(text, rows, length, generator))
            if not math.isfinite(loss.item()):
                raise ArithmeticError(f"the loss is {loss.item()} at step {result.steps}")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            result.steps += 1
            result.losses.append(loss.item() / math.log(2))
            spent = time.monotonic() - start
            result.tokens_per_second = result.steps * rows * length / spent
            what = (
                f"step {result.steps}  {result.losses[-1]:.3f} bits/byte  "
                f"{result.tokens_per_second:,.0f} tokens/s"
            )
            left = f"{max(0.0, seconds - spent):.0f} s left"
            progress.update(bar, completed=spent, description=what, left=left)


@torch.no_grad()
def _score(model: ByteLanguageModel, text: torch.Tensor, length: int) -> float:
    """Return bits a byte over windows that do not overlap."""
    windows = text[: text.numel() // (length + 1) * (length + 1)].long().view(-1, length + 1)
    losses = [model.loss(part).item() * part.shape[0] for part in windows.split(8)]
    return sum(losses) / windows.shape[0] / math.log(2)


def _sample(model: ByteLanguageModel, result: Result, console: Console, size: int = 400) -> None:
    generator = torch.Generator().manual_seed(0)
    start = time.monotonic()
    made = bytes(islice(model.generate(PROMPT, generator=generator), size))
    result.decode_tokens_per_second = size / (time.monotonic() - start)
    result.sample = (PROMPT + made).decode(errors="replace")
    console.rule("sample")
    console.print(result.sample, markup=False, highlight=False)
    console.rule()


def _write(model: ByteLanguageModel, result: Result, output: Path, seed: int) -> None:
    """Write every file whole: beside its place first, then moved there."""
    weights = output / "model.tmp"
    save_file({n: p.detach().contiguous() for n, p in model.state_dict().items()}, weights)
    weights.replace(output / "model.safetensors")
    about = {
        "linattn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": seed,
        "configuration": asdict(model.configuration),
        **asdict(result),
    }
    beside = output / "run.tmp"
    beside.write_text(json.dumps(about, indent=1))
    beside.replace(output / "run.json")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(range(1, len(result.losses) + 1), result.losses, linewidth=0.8, label="training")
    axis.axhline(result.held_out_bits, color="C1", label="held out, at the end")
    axis.axhline(result.bigram_bits, color="C3", linestyle="--", label="byte-bigram entropy")
    axis.set(xlabel="step", ylabel="loss [bits/byte]")
    axis.legend()
    figure.savefig(output / "loss.tmp.png", dpi=110)
    plt.close(figure)
    (output / "loss.tmp.png").replace(output / "loss.png")


def _report(result: Result, console: Console) -> None:
    table = Table("language model", "")
    table.add_row("steps", str(result.steps))
    table.add_row("training", f"{result.tokens_per_second:,.0f} tokens/s")
    table.add_row("recurrent decode", f"{result.decode_tokens_per_second:,.0f} tokens/s")
    table.add_row("held-out loss", f"{result.held_out_bits:.3f} bits/byte")
    table.add_row("byte-bigram entropy", f"{result.bigram_bits:.3f} bits/byte")
    console.print(table)
    below = result.held_out_bits < result.bigram_bits
    verdict = "below" if below else "NOT below"
    console.print(
        f"The held-out loss is {verdict} the byte-bigram entropy of the same text.",
        style="green" if below else "red",
    )
