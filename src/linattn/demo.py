"""`linattn demo`: train MetaLA on Python's own source for a minute or two, then sample from it.

Says whether the held-out loss beats the byte-bigram entropy of the same text: a model below it has
learned from context. The command runs a short benchmark after that.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from linattn._validation import reject, require_number
from linattn.generate import generate, printable
from linattn.tasks.standard_library import bigram_entropy
from linattn.train import Run, Settings, train
from linattn.train.record import write_json

PROMPT = "def "
LEAST_STEPS = 200  # taken however long they take: on a busy machine the time alone says little


def run(
    minutes: float = 1.5,
    output: Path = Path("runs/demo"),
    console: Console | None = None,
    settings: Settings | None = None,
    sample_tokens: int = 400,
) -> bool:
    """Train for about `minutes`, score, sample; write the run to output / "train", and demo.json.

    Args:
        minutes: wall-clock time to train for; the steps that fit in are counted beforehand.
        output: folder for the files. A demo that was there before is replaced.
        console: where to print.
        settings: of the run, but for the number of steps.
        sample_tokens: length of the sample.

    Returns:
        Whether the held-out loss is below the byte-bigram entropy of the same held-out text.

    Raises:
        ValueError: minutes not > 0, or too little text.
        ArithmeticError: the loss is no longer finite.
        KeyboardInterrupt: Ctrl-C, after a checkpoint.
    """
    require_number("minutes", minutes)
    if minutes <= 0:
        reject("minutes", minutes, "a number > 0")
    console = Console() if console is None else console
    settings = Settings() if settings is None else settings
    steps = max(LEAST_STEPS, int(60 * minutes / seconds_per_step(settings)))
    folder = output / "train"
    if (folder / "log.csv").exists():  # an earlier demo: nothing else is called so here
        shutil.rmtree(folder)
    settings = replace(settings, steps=steps, evaluate_every=max(1, steps // 4))
    done = train(settings, folder, console=console)

    found = json.loads((folder / "run.json").read_text())
    windows = done.scored.tokens.view(-1, settings.length)
    bigram, held_out = bigram_entropy(windows), found["held_out_bits_per_byte"]
    made = generate(done.model.eval(), done.tokenizer, PROMPT, sample_tokens, seed=settings.seed)
    sample = printable(PROMPT + made.text)
    console.rule("sample, by recurrent decode")
    console.print(sample, markup=False, highlight=False)
    console.rule()
    below = bool(held_out < bigram)
    write_json(
        output / "demo.json",
        {**found, "bigram_bits_per_byte": bigram, "below": below, "sample": sample,
         "decode_tokens_per_second": made.tokens_per_second},
    )  # fmt: skip
    table = Table("language model", "MetaLA")
    table.add_row("parameters", f"{found['parameters']:,}")
    table.add_row("steps", f"{steps} in {found['seconds']:.0f} s")
    table.add_row("training", f"{found['tokens_per_second']:,.0f} tokens/s")
    table.add_row("recurrent decode", f"{made.tokens_per_second:,.0f} tokens/s")
    table.add_row("held-out loss", f"{held_out:.3f} bits/byte")
    table.add_row("byte-bigram entropy", f"{bigram:.3f} bits/byte")
    table.add_row("run", str(folder))
    console.print(table)
    console.print(
        f"The held-out loss is {'below' if below else 'NOT below'} the byte-bigram entropy of the "
        "same text.",
        style="green" if below else "red",
    )
    return below


def seconds_per_step(settings: Settings) -> float:
    """Return how long a step takes here: the fastest of five after two to warm up."""
    run = Run(settings)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run.train_step()
        times.append(time.perf_counter() - start)
    return min(times[2:])
