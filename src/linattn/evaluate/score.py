"""How many answers of a model are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn.evaluate.batches import inputs
from linattn.evaluate.tasks import Data
from linattn.tasks.examples import UNSCORED, Examples, accuracy


@torch.inference_mode()
def score(model: nn.Module, data: Data, rows: int = 64) -> dict[str, float]:
    """Return the accuracy of a model and its loss in nats an answer.

    Of `Examples` "accuracy" is the mean over examples of the share of right answers, and
    "all_right" the share of examples without a wrong one.

    Args:
        model: a language model for `Examples`, a classifier for `Classes`.
        data: what to score.
        rows: examples of a forward pass.
    """
    training = model.training
    model.train(False)
    predicted: list[Tensor] = []
    loss, asked = 0.0, 0
    for first in range(0, len(data.labels), rows):
        part = slice(first, first + rows)
        given = inputs(data, part)
        labels = given.pop("shift_labels") if isinstance(data, Examples) else given.pop("labels")
        logits = model(**given).logits.float()
        predicted.append(logits.argmax(-1))
        loss += nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=UNSCORED, reduction="sum"
        ).item()
        asked += int((labels != UNSCORED).sum())
    model.train(training)
    answers = torch.cat(predicted)
    if isinstance(data, Examples):
        mean, all_right = accuracy(answers, data.labels)
        return {"accuracy": mean, "all_right": all_right, "loss": loss / asked}
    right = (answers == data.labels).float().mean().item()
    return {"accuracy": right, "loss": loss / asked}


def state_bytes(model: Any, tokens: int) -> int | None:
    """Return the bytes of float32 state a row of so many tokens; None: it reads both ways."""
    total = 0
    if model.config.bidirectional:
        return None
    for layer in model.model.layers:
        softmax = type(layer.mixer).__name__ == "SoftmaxAttention"
        total += layer.mixer.state_size(tokens) if softmax else layer.mixer.state_size()
    return 4 * total
