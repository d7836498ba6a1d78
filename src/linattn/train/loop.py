"""`linattn train`: one loop for every mixer. Reads top to bottom.

A step depends on its number, the seed and the weights alone, so that a run that was cut goes on
from its last checkpoint with the same batches to the same losses.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers.utils import logging

from linattn._interrupts import interrupts
from linattn.bench import matmul_rate
from linattn.models import LinattnForCausalLM
from linattn.models.flops import training_flops
from linattn.models.tokenizers import encoder, load_tokenizer
from linattn.tasks import language
from linattn.tasks.language import Batch
from linattn.train import checkpoints
from linattn.train.record import Log, about, summary, write_json
from linattn.train.settings import PRECISIONS, Settings


class Run:
    """A model in training, and all that goes on with it from one step to the next."""

    def __init__(self, settings: Settings):
        """Read the text and build the model, first weights by the seed.

        Raises:
            ValueError: too little text, or settings that the model refuses.
        """
        self.settings = s = settings
        self.tokenizer = load_tokenizer(s.tokenizer)
        self.text, self.held_out = language.load(s.source, encoder(s.tokenizer, self.tokenizer))
        language.batch(self.text, s.rows, s.length, 0, s.seed)  # refuses too little text
        self.scored = language.spread(self.held_out, s.held_out_rows, s.length)
        torch.manual_seed(s.seed)
        self.model = LinattnForCausalLM(s.configuration(len(self.tokenizer)))
        self.forward: Any = torch.compile(self.model) if s.compile else self.model
        self.optimizers = s.optimizers(self.model)
        self.scaler = torch.amp.GradScaler("cpu", enabled=s.precision == "float16")
        self.step = 0
        self.seconds = 0.0

    def train_step(self) -> tuple[float, float]:
        """Take one step; return its loss in nats a token and the norm of the gradient.

        Raises:
            ArithmeticError: the loss or the gradient is not finite; no weight has changed.
        """
        s = self.settings
        self.model.train()
        torch.manual_seed(s.seed * 1_000_003 + self.step)  # of dropout
        first = self.step * s.accumulation
        batches = [
            language.batch(self.text, s.rows, s.length, first + i, s.seed)
            for i in range(s.accumulation)
        ]
        predicted = sum(batch.scored for batch in batches)
        loss = 0.0
        for batch in batches:
            part = self.loss(batch, predicted)
            loss += part.item()
            self.scaler.scale(part).backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            for group in optimizer.param_groups:
                group["lr"] = s.rate(self.step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), s.clip).item()
        skips = self.scaler.is_enabled()  # a scale too large: the scaler leaves such a step out
        if not math.isfinite(loss) or not (math.isfinite(norm) or skips):
            raise ArithmeticError(f"loss {loss} and gradient norm {norm} at step {self.step}")
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        self.step += 1
        return loss, norm

    def loss(self, batch: Batch, predicted: int) -> Tensor:
        """Return the summed loss of a batch over `predicted` tokens."""
        dtype = PRECISIONS[self.settings.precision]
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            loss: Tensor = self.forward(
                batch.tokens, labels=batch.tokens, cu_seq_lens_q=batch.cu_seqlens,
                num_items_in_batch=predicted,
            ).loss  # fmt: skip
        return loss

    @torch.no_grad()
    def score(self) -> float:
        """Return bits a byte of the held-out text, every window read without what is before it."""
        self.model.eval()
        loss = self.loss(self.scored, self.scored.scored).item()
        return loss / self.held_out.bytes_per_token / math.log(2)

    def save(self, folder: Path) -> Path:
        """Write a checkpoint below folder; return where it is."""
        progress: dict[str, Any] = {"settings": asdict(self.settings), "text": self.text.digest}
        progress |= {"seconds": self.seconds, "scaler": self.scaler.state_dict()}
        return checkpoints.save(
            folder, self.step, self.model, self.tokenizer, self.optimizers, progress
        )

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of the same settings and text."""
        progress = checkpoints.progress_of(checkpoint, self.text.digest)
        checkpoints.restore(checkpoint, self.model, self.optimizers)
        self.step, self.seconds = progress["step"], progress["seconds"]
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(progress["scaler"])


def train(
    settings: Settings, output: Path, *, resume: bool = False, console: Console | None = None
) -> Run:
    """Train, and write checkpoints, log.csv, loss.png and run.json to the folder output.

    Ctrl-C ends the run after the step it is in, with a checkpoint. A step that is not finite ends
    it with an error; the last good checkpoint stays.

    Raises:
        ValueError: settings or text that do not do; an output that holds a run already, without
            resume; with resume none, or one of other settings.
        ArithmeticError: a loss that is not finite.
        OSError: a disk that is full.
        KeyboardInterrupt: Ctrl-C, after the checkpoint.
    """
    console = Console() if console is None else console
    logging.disable_progress_bar()  # of transformers, one for every checkpoint
    start = checkpoints.starting_point(output, asdict(settings), resume)
    run = Run(settings)
    if start is not None:
        run.restore(start)
    output.mkdir(parents=True, exist_ok=True)
    log = Log(output, run.step)
    rate = matmul_rate(settings.precision, "cpu")
    share = training_flops(run.model, settings.length) / rate
    parameters = run.model.num_parameters()
    facts = about(settings, parameters, rate)
    console.print(
        f"{parameters:,} parameters, {run.text.tokens.numel():,} tokens of text, steps "
        f"{run.step} to {settings.steps}, matmul rate {rate / 1e9:.0f} GFLOP/s",
        highlight=False,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        with interrupts() as asked, Progress(*columns, console=console) as progress:
            bar = progress.add_task("training", total=settings.steps, completed=run.step)
            while run.step < settings.steps and not asked:
                row = logged_step(run, log)
                speed = row["tokens"] / row["took"]
                text = (
                    f"step {run.step}  loss {row['loss']:.3f}  {row['bits_per_byte']:.3f} "
                    f"bits/byte  {speed:,.0f} tokens/s  MFU {speed * share:.0%}"
                )
                progress.update(bar, completed=run.step, description=text)
                if run.step % settings.checkpoint_every == 0 or run.step == settings.steps:
                    run.save(output)
            if asked:
                console.print(f"interrupted: --resume goes on from {run.save(output)}")
                raise KeyboardInterrupt
    finally:
        if log.rows:
            log.picture()
        facts |= summary(log.rows, run.step, settings.steps, share)
        write_json(output / "run.json", facts)
    return run


def logged_step(run: Run, log: Log) -> dict[str, float]:
    """Take a step, score the held-out text where it is due, log and return the row."""
    s, number, start = run.settings, run.step, time.perf_counter()
    loss, norm = run.train_step()
    took = time.perf_counter() - start
    run.seconds += took
    row = {
        "step": number,
        "loss": loss,
        "bits_per_byte": loss / run.text.bytes_per_token / math.log(2),
        "learning_rate": s.rate(number),
        "gradient_norm": norm,
        "tokens": s.rows * s.length * s.accumulation,
        "seconds": run.seconds,
    }
    if run.step == s.steps or (s.evaluate_every and run.step % s.evaluate_every == 0):
        row["held_out_bits"] = run.score()
    log.add(row)
    return {**row, "took": took}
