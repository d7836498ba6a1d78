"""What one trained evaluation is told, and the folder that its choices belong to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linattn._validation import reject, require_number, require_positive_int, require_seed
from linattn.evaluate import tasks
from linattn.models import LinattnConfig

SCHEDULES = ("cosine", "linear", "constant_with_warmup")


@dataclass(frozen=True)
class Settings:
    """A model of one mixer, trained and scored on one task.

    Attributes:
        task: a name of `linattn.evaluate.tasks.TASKS`.
        mixer: name of a mixer, or several, repeated down the layers.
        train: options of the data, once for every set that is trained on, {}: the defaults.
        test: the same for every set that is scored; none: those of `train`.
        model: options of `LinattnConfig`.
        path: the user's file or folder, for tasks that read one.
        examples, test_examples: how many of each set, of tasks that draw; None: the task's own.
        steps: optimiser steps.
        rows: examples of a batch; a batch is of one set.
        learning_rate: the highest, after warm_up steps; then falls by `schedule` to 0.
        weight_decay: of AdamW, not of norms and biases.
        clip: largest norm of the gradient; 0: any.
        evaluate_every: steps between two scores of the validation examples, each with a
            checkpoint. The weights of the best are tested.
        stop_at: stop as soon as the validation accuracy is above this.
        seed: of data, weights, batches and dropout.
    """

    task: str
    mixer: tuple[str, ...] = ("metala",)
    train: tuple[dict[str, Any], ...] = ({},)
    test: tuple[dict[str, Any], ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    examples: int | None = None
    test_examples: int | None = None
    steps: int = 2000
    rows: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warm_up: int = 100
    clip: float = 1.0
    evaluate_every: int = 250
    stop_at: float = 0.99
    seed: int = 0

    def __post_init__(self) -> None:
        task = tasks.get(self.task)
        for name in ("steps", "rows", "evaluate_every"):
            require_positive_int(name, getattr(self, name))
        for name in ("examples", "test_examples"):
            if getattr(self, name) is not None:
                require_positive_int(name, getattr(self, name))
        require_seed(self.seed)
        for name in OF_THE_DATA:
            if name in self.model:
                reject("model", repr(name), "none of what the data or --mixer says")
        for name in ("learning_rate", "weight_decay", "warm_up", "clip", "stop_at"):
            require_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                reject(name, getattr(self, name), "a number >= 0")
        if self.schedule not in SCHEDULES:
            reject("schedule", repr(self.schedule), f"one of {SCHEDULES}")
        if not self.train:
            reject("train", "no set", "at least one")
        if task.from_path != (self.path is not None):
            need = "the user's folder" if task.from_path else f"none: {self.task} has its own data"
            reject("path", self.path, need)
        if self.path is not None and not Path(self.path).exists():
            reject("path", self.path, "an existing folder")
        known = task.options()
        for name in ("train", "test"):
            for options in getattr(self, name):
                for option in options:
                    if option not in known:
                        reject(name, repr(option), f"options of {self.task}: {sorted(known)}")
        self.configuration()  # refuses what the model would

    @property
    def tests(self) -> tuple[dict[str, Any], ...]:
        """The options of the sets that are scored."""
        return self.test or self.train

    def configuration(self) -> LinattnConfig:
        """Return the configuration of the model."""
        task = tasks.get(self.task)
        sizes = [task.vocabulary({**task.options(), **o}) for o in (*self.train, *self.tests)]
        mixer = self.mixer[0] if len(self.mixer) == 1 else list(self.mixer)
        options = {**DEFAULTS, "vocab_size": max(sizes), **task.model, **self.model}
        return LinattnConfig(mixer=mixer, **options)

    def name(self) -> str:
        """Return the name of the folder: what is most often compared, and a digest of it all."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        dim = self.configuration().hidden_size
        return f"{'+'.join(self.mixer)}-{dim}-{self.learning_rate:g}-{self.seed}-{digest}"


OF_THE_DATA = ("vocab_size", "mixer", "num_labels", "image_size", "num_channels", "two_towers",
               "pixel_embedding", "patch_size")  # fmt: skip
# Zoology's shape (Arora et al. 2023): two layers of a mixer, one head.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": 4096,
}
