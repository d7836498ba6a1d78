"""What a training run is told: every choice, checked before anything is read or written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linattn._validation import (
    reject,
    require_bool,
    require_number,
    require_positive_int,
    require_seed,
)
from linattn.models import LinattnConfig, LinattnForCausalLM
from linattn.models.presets import preset

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """A run of `linattn train`.

    Attributes:
        data: text file, folder of text files, or None: the source of Python's standard library.
        tokenizer: "bytes", or a name or folder that transformers' AutoTokenizer takes.
        preset: sizes of the model, a name of `linattn.models.presets.PRESETS`.
        mixer: name of a mixer, or several, repeated down the layers.
        changes: further options of `LinattnConfig`, by name.
        steps: optimiser steps.
        rows: windows of text in a batch, packed in one row.
        length: tokens of a window.
        accumulation: batches to a step.
        optimizer: "adamw", or "muon", with AdamW for all that is no projection of a layer.
        learning_rate: after warm_up steps; falls to a tenth on a cosine.
        weight_decay: of projections; not of embeddings, norms, biases, decays, convolutions.
        clip: largest norm of the gradient.
        precision: of the forward pass under autocast: float32, bfloat16, float16 (with a scaler).
        compile: whether torch.compile makes the model.
        evaluate_every: steps between two scores of held-out text; 0: at the end only.
        checkpoint_every: steps between two checkpoints; there is one at the end.
        held_out_rows: windows of held-out text to score.
        seed: of the weights, the batches and the dropout.
    """

    data: str | None = None
    tokenizer: str = "bytes"
    preset: str = "bytes-800k"
    mixer: tuple[str, ...] = ("metala",)
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int = 1000
    rows: int = 4
    length: int = 512
    accumulation: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    warm_up: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "float32"
    compile: bool = False
    evaluate_every: int = 250
    checkpoint_every: int = 250
    held_out_rows: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "rows",
            "length",
            "accumulation",
            "checkpoint_every",
            "held_out_rows",
        ):
            require_positive_int(name, getattr(self, name))
        require_positive_int("checkpoint_every", self.checkpoint_every)
        if self.length < 2:
            reject("length", self.length, "at least 2 tokens: one to predict from")
        require_seed(self.seed)
        for name, option in (("vocab_size", "tokenizer"), ("mixer", "mixer")):
            if name in self.changes:
                reject("changes", repr(name), f"none of what the option {option!r} says")
        for name in ("learning_rate", "weight_decay", "clip", "warm_up", "evaluate_every"):
            require_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                reject(name, getattr(self, name), "a number >= 0")
        if self.clip == 0:
            reject("clip", 0, "a number > 0")
        require_bool("compile", self.compile)
        for name, choices in (("optimizer", ("adamw", "muon")), ("precision", tuple(PRECISIONS))):
            if getattr(self, name) not in choices:
                reject(name, repr(getattr(self, name)), f"one of {choices}")
        self.configuration(256)  # refuses what the model would

    def configuration(self, vocabulary: int) -> LinattnConfig:
        """Return the configuration of the model for so many tokens."""
        mixer = self.mixer[0] if len(self.mixer) == 1 else list(self.mixer)
        return preset(self.preset, mixer, **{"vocab_size": vocabulary, **self.changes})

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, the first being 0: warm-up, then a cosine."""
        warm = min(1.0, (step + 1) / max(1, self.warm_up))
        share = max(0, step - self.warm_up) / max(1, self.steps - 1 - self.warm_up)
        return self.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, share)))

    def optimizers(self, model: LinattnForCausalLM) -> list[torch.optim.Optimizer]:
        """Return the optimisers of a model, each parameter in one of them."""
        layers = {
            id(module.weight)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and "layers." in name
        }
        parameters = list(model.parameters())
        hidden = [p for p in parameters if id(p) in layers]
        rest = [p for p in parameters if id(p) not in layers]
        rate, decay = self.learning_rate, self.weight_decay
        if self.optimizer == "muon":
            return [
                torch.optim.Muon(
                    hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
                ),
                torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
            ]
        groups = [
            {"params": hidden, "weight_decay": decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))]

    @property
    def source(self) -> Path | None:
        """Where the text is."""
        return None if self.data is None else Path(self.data)
