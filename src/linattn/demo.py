"""`linattn demo`: train a small language model on Python's own source for a minute or two.

Then sample from it by recurrent decode, and say whether it beats the byte-bigram entropy. The
command runs a short benchmark after that; this module is the language model's part.
"""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from linattn import __version__
from linattn._validation import reject, require_number
from linattn.models.byte_language_model import ByteLanguageModel, Configuration, save
from linattn.tasks import standard_library

PROMPT = b"def "
LEARNING_RATE = 3e-3
WARM_UP = 20  # steps
LEAST_STEPS = 200  # taken however long they take: on a busy machine the time alone says little
HELD_OUT_ROWS = 128  # windows to score, spread over the whole held-out text


@dataclass
class Result:
    """What a run has found so far; None where it has not got that far."""

    steps: int = 0
    train_s: float = 0.0
    tokens_per_second: float | None = None
    held_out_bits: float | None = None
    bigram_bits: float | None = None
    decode_tokens_per_second: float | None = None
    interrupted: bool = False
    sample: str = ""
    losses: list[float] = field(default_factory=list)  # bits a byte, one a step

    @property
    def below(self) -> bool:
        """Whether the held-out loss is known and below the byte-bigram entropy."""
        return (
            self.held_out_bits is not None
            and self.bigram_bits is not None
            and self.held_out_bits < self.bigram_bits
        )


def run(
    minutes: float = 1.5,
    output: Path = Path("runs/demo"),
    console: Console | None = None,
    configuration: Configuration | None = None,
    rows: int = 4,
    length: int = 512,
    sample_bytes: int = 400,
    seed: int = 0,
    folder: Path | None = None,
) -> bool:
    """Train for `minutes`, score, sample; write model.safetensors, run.json and loss.png.

    Ctrl-C ends the training early and goes on with what was learned; a second one stops, and what
    there is by then is kept.

    Args:
        minutes: wall-clock time to train for.
        output: folder for the files, made if it is not there.
        console: where to print.
        configuration: sizes of the model.
        rows: windows in a batch.
        length: bytes in a window.
        sample_bytes: length of the sample.
        seed: of the weights, the batches and the sample.
        folder: where the text is; default the standard library.

    Returns:
        Whether the held-out loss is below the byte-bigram entropy of the same held-out text.

    Raises:
        ValueError: minutes not > 0, rows or length < 1, output not a folder, or too little text.
        ArithmeticError: the loss is no longer finite.
    """
    require_number("minutes", minutes)
    if minutes <= 0:
        reject("minutes", minutes, "a number > 0")
    if output.exists() and not output.is_dir():
        reject("output", f"{output}, a file", "a folder")
    console = Console() if console is None else console
    corpus = standard_library.load(folder)
    held_out = standard_library.spread(corpus.held_out, HELD_OUT_ROWS, length)
    generator = torch.Generator().manual_seed(seed)
    standard_library.batch(corpus.train, rows, length, generator)  # refuses before any file
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = ByteLanguageModel(configuration)
    result = Result(bigram_bits=standard_library.bigram_entropy(held_out))
    options = {"minutes": minutes, "rows": rows, "length": length, "seed": seed}
    about = _about(model, corpus, held_out, options)
    console.print(
        f"{corpus.train.numel() / 1e6:.1f} MB of Python's own source, {about['parameters']:,} "
        f"parameters, {minutes:g} min, {torch.get_num_threads()} threads",
        highlight=False,
    )
    try:
        _train(model, corpus.train, 60 * minutes, rows, length, generator, result, console)
    except KeyboardInterrupt:
        result.interrupted = True
        console.print("interrupted: going on with what was learned", style="yellow")
    _write(model, result, about, output)
    model.eval()
    result.held_out_bits = _score(model, held_out)
    _sample(model, result, sample_bytes, seed, console)
    _write(model, result, about, output)
    _report(result, output, console)
    return result.below


def _about(
    model: ByteLanguageModel,
    corpus: standard_library.Corpus,
    held_out: torch.Tensor,
    options: dict[str, float],
) -> dict[str, Any]:
    """Return what the results depend on."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "linattn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **options,
        "configuration": asdict(model.configuration),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_bytes": corpus.train.numel(),
        "held_out_bytes": corpus.held_out.numel(),
        "scored_bytes": held_out[:, 1:].numel(),
    }


def learning_rate(step: int, share: float) -> float:
    """Return the rate: linear warm-up by steps, then a cosine of the time spent, to a tenth."""
    cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, share))
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * cosine


def _train(
    model: ByteLanguageModel, text: torch.Tensor, seconds: float, rows: int, length: int,
    generator: torch.Generator, result: Result, console: Console,
) -> None:  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    start = time.monotonic()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=seconds, left="")
        while (spent := time.monotonic() - start) < seconds or result.steps < LEAST_STEPS:
            optimizer.param_groups[0]["lr"] = learning_rate(result.steps, spent / seconds)
            loss = model.loss(standard_library.batch(text, rows, length, generator))
            value = loss.item()
            if not math.isfinite(value):
                raise ArithmeticError(f"the loss is {value} at step {result.steps}")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            result.steps += 1
            result.losses.append(value / math.log(2))
            result.train_s = time.monotonic() - start
            result.tokens_per_second = result.steps * rows * length / result.train_s
            progress.update(
                bar,
                completed=result.train_s,
                description=f"step {result.steps}  {result.losses[-1]:.3f} bits/byte  "
                f"{result.tokens_per_second:,.0f} tokens/s",
                left=f"{max(0.0, seconds - result.train_s):.0f} s left",
            )


@torch.no_grad()
def _score(model: ByteLanguageModel, windows: torch.Tensor) -> float:
    """Return bits a byte over windows [rows, length + 1], each read without what is before it."""
    losses: list[float] = [model.loss(part).item() * part.shape[0] for part in windows.split(8)]
    return sum(losses) / windows.shape[0] / math.log(2)


def _sample(
    model: ByteLanguageModel, result: Result, size: int, seed: int, console: Console
) -> None:
    generator = torch.Generator().manual_seed(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a step is too short to share: see docs/log.md
    try:
        start = time.monotonic()
        made = model.generate(PROMPT, size, generator=generator)
        result.decode_tokens_per_second = size / (time.monotonic() - start)
    finally:
        torch.set_num_threads(threads)
    # A half-trained model writes control characters too, which a terminal would obey.
    result.sample = "".join(
        c if c.isprintable() or c in "\n\t" else "?"
        for c in (PROMPT + made).decode("ascii", "replace").replace("\ufffd", "?")
    )
    console.rule("sample, by recurrent decode")
    console.print(result.sample, markup=False, highlight=False)
    console.rule()


def _write(model: ByteLanguageModel, result: Result, about: dict[str, Any], output: Path) -> None:
    """Write every file whole: beside its place first, then moved there."""
    save(model, output / "model.safetensors")
    beside = output / "run.tmp"
    beside.write_text(json.dumps({**about, **asdict(result), "below": result.below}, indent=1))
    beside.replace(output / "run.json")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(range(1, len(result.losses) + 1), result.losses, linewidth=0.8, label="training")
    if result.held_out_bits is not None:
        axis.axhline(result.held_out_bits, color="C1", label="held out, at the end")
    if result.bigram_bits is not None:
        label = "byte-bigram entropy of the held-out text"
        axis.axhline(result.bigram_bits, color="C3", linestyle="--", label=label)
    axis.set(xlabel="step", ylabel="loss [bits/byte]")
    axis.legend()
    figure.savefig(output / "loss.tmp.png", dpi=110)
    plt.close(figure)
    (output / "loss.tmp.png").replace(output / "loss.png")


def _report(result: Result, output: Path, console: Console) -> None:
    table = Table("language model", "")
    table.add_row("steps", f"{result.steps} in {result.train_s:.0f} s")
    for name, value, unit in (
        ("training", result.tokens_per_second, "tokens/s"),
        ("recurrent decode", result.decode_tokens_per_second, "tokens/s"),
        ("held-out loss", result.held_out_bits, "bits/byte"),
        ("byte-bigram entropy", result.bigram_bits, "bits/byte"),
    ):
        if value is not None:
            table.add_row(name, f"{value:,.{0 if unit == 'tokens/s' else 3}f} {unit}")
    for name in ("model.safetensors", "run.json", "loss.png"):
        table.add_row(name.split(".")[0], str(output / name))
    console.print(table)
    verdict = "below" if result.below else "NOT below"
    console.print(
        f"The held-out loss is {verdict} the byte-bigram entropy of the same text.",
        style="green" if result.below else "red",
    )
