"""One model trained and tested on a task by transformers' Trainer; a trial that was cut goes on."""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerState
from transformers.utils import logging

from linattn import __version__
from linattn._validation import reject
from linattn.bench import machine
from linattn.evaluate import tasks
from linattn.evaluate.batches import Batches, Inputs
from linattn.evaluate.score import score, state_bytes
from linattn.evaluate.settings import Settings
from linattn.evaluate.tasks import Data
from linattn.models import (
    LinattnForCausalLM,
    LinattnForImageClassification,
    LinattnForSequenceClassification,
)
from linattn.tasks.examples import Examples
from linattn.train.record import write_json

Tell = Callable[[int, float, float], None]  # steps done, loss, validation accuracy


def run(settings: Settings, folder: Path, tell: Tell | None = None) -> dict[str, Any]:
    """Return what a trial came to, trained now, gone on with, or read from its result.json.

    Args:
        settings: every choice.
        folder: of this trial alone: result.json, and model/, the weights of the best validation
            score.
        tell: called after every step.

    Raises:
        ValueError: data or sizes that do not fit; a result.json that is none.
    """
    path = folder / "result.json"
    if path.exists():
        return read(path)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a tied output layer is not in a checkpoint, and it says so
    s, task = settings, tasks.get(settings.task)
    where = None if s.path is None else Path(s.path)

    def data(split: str, sets: tuple[dict[str, Any], ...], number: int | None) -> list[Data]:
        return [task.data(split, options, number, s.seed, where) for options in sets]

    train = data("train", s.train, s.examples)
    validation = data("validation", s.train, s.test_examples)
    testing = data("test", s.tests, s.test_examples)  # refuses bad options before the training
    torch.manual_seed(s.seed)
    model = build(settings, train[0])
    trainer = _Trainer(model, arguments(s, folder / "checkpoints"), train, validation, s, tell)
    newest = _newest(folder / "checkpoints")
    if not trainer.ended_at(newest):
        trainer.train(resume_from_checkpoint=newest)
    seconds = trainer.seconds()
    model.save_pretrained(folder / "model")
    tests = []
    for options, part in zip(s.tests, testing, strict=True):
        tests.append({"data": options, **score(model, part, s.rows)})
    tokens = max(d.tokens.shape[1] if isinstance(d, Examples) else 0 for d in train)
    found = {
        "kind": "trial", "settings": asdict(s), "tests": tests,
        "validation": trainer.state.best_metric, "steps": trainer.state.global_step,
        "seconds": seconds, "diverged": trainer.diverged,
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": state_bytes(model, tokens), **about(),
    }  # fmt: skip
    write_json(path, without_nan(found))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return found


def read(path: Path) -> dict[str, Any]:
    """Return a result that `run` wrote.

    Raises:
        ValueError: another file, or a damaged one.
    """
    try:
        found = json.loads(path.read_text())
        whole = isinstance(found, dict) and {"settings", "tests", "validation"} <= found.keys()
    except (OSError, ValueError):
        whole = False
    if not whole:
        reject("result", f"{path}, which is damaged", "what a trial wrote; or remove it")
    return dict(found)


def build(settings: Settings, data: Data) -> Any:
    """Return the model for data of this kind, first weights by torch's own seed."""
    config = settings.configuration()
    if isinstance(data, Examples):
        return LinattnForCausalLM(config)
    images = data.inputs.dim() == 4
    return (LinattnForImageClassification if images else LinattnForSequenceClassification)(config)


def about() -> dict[str, Any]:
    """Return what numbers depend on beside the settings."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "linattn": __version__,
        "python": platform.python_version(),
    }  # fmt: skip


def without_nan(value: Any) -> Any:
    """Return a value for JSON, which has no NaN: None in its place."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def arguments(s: Settings, folder: Path) -> TrainingArguments:
    """Return the settings as Trainer takes them."""
    every = min(s.evaluate_every, s.steps)
    return TrainingArguments(
        output_dir=str(folder), max_steps=s.steps, per_device_train_batch_size=1,
        learning_rate=s.learning_rate, weight_decay=s.weight_decay, max_grad_norm=s.clip,
        lr_scheduler_type=s.schedule, warmup_steps=min(s.warm_up, s.steps - 1), logging_steps=20,
        eval_strategy="steps", eval_steps=every, save_strategy="steps", save_steps=every,
        save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="accuracy",
        greater_is_better=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
        dataloader_pin_memory=False, logging_nan_inf_filter=False, seed=s.seed,
    )  # fmt: skip


def _newest(folder: Path) -> str | None:
    """Return the newest checkpoint that is whole: trainer_state.json is written last."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda p: -int(p.name.split("-")[1])):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            shutil.rmtree(path, ignore_errors=True)
            continue
        return str(path)
    return None


def _single(batch: list[Inputs]) -> Inputs:
    (inputs,) = batch  # an item of `Batches` is a batch
    return inputs


class _Trainer(Trainer):
    """Trainer over `Batches` in their order, with this package's own score."""

    def __init__(
        self, model: Any, args: TrainingArguments, train: list[Data], validation: list[Data],
        settings: Settings, tell: Tell | None,
    ):  # fmt: skip
        self.batches = Batches(train, settings.rows, settings.steps, settings.seed)
        super().__init__(
            model, args, _single, train_dataset=self.batches, eval_dataset=self.batches,
            callbacks=[_Watch(self, settings.stop_at, tell)],
        )  # fmt: skip
        self.remove_callback(PrinterCallback)
        self.validation, self.rows, self.diverged = validation, settings.rows, False
        self.stop_at, self.begin = settings.stop_at, time.monotonic()

    def seconds(self) -> float:
        """Return the seconds of training so far, those before a cut too."""
        return time.monotonic() - self.begin

    def ended_at(self, checkpoint: str | None) -> bool:
        """Return whether a trial that was cut had ended, with its best weights in place then."""
        if checkpoint is None:
            return False
        state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        scored = [entry for entry in state.log_history if "eval_accuracy" in entry]
        if scored:
            self.begin -= scored[-1]["eval_seconds"]
        learned = any(entry["eval_accuracy"] > self.stop_at for entry in scored)
        if learned or state.global_step >= self.args.max_steps:
            self.state = state
            self._load_best_model()
            return True
        return False

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.batches)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean accuracy over the validation sets."""
        assert self.model is not None
        found = [score(self.model, data, self.rows)["accuracy"] for data in self.validation]
        metrics = {f"{metric_key_prefix}_accuracy": sum(found) / len(found)}
        metrics[f"{metric_key_prefix}_seconds"] = self.seconds()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


class _Watch(TrainerCallback):
    """Tells how far a trial is; ends it where it has learned, or diverged."""

    def __init__(self, trainer: _Trainer, stop_at: float, tell: Tell | None):
        self.trainer, self.stop_at, self.tell = trainer, stop_at, tell
        self.loss, self.accuracy = math.nan, math.nan

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell."""
        if self.tell is not None:
            self.tell(state.global_step, self.loss, self.accuracy)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Read the loss."""
        if "loss" in logs:
            self.loss = float(logs["loss"])
            if not math.isfinite(self.loss):
                self.trainer.diverged = control.should_training_stop = True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Stop where the accuracy is high enough."""
        self.accuracy = metrics["eval_accuracy"]
        if self.accuracy > self.stop_at:
            control.should_training_stop = True
