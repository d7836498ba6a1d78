"""Batches of a task's examples, each of one set; batch i is the same whatever came before."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import Dataset

from linattn._validation import reject
from linattn.evaluate.tasks import Data
from linattn.tasks.examples import Examples

Inputs = dict[str, Tensor]


def inputs(data: Data, rows: Tensor | slice) -> Inputs:
    """Return what a model's `forward` takes for these rows of the data."""
    if isinstance(data, Examples):
        return {"input_ids": data.tokens[rows], "shift_labels": data.labels[rows]}
    if data.inputs.dim() == 4:
        return {"pixel_values": data.inputs[rows], "labels": data.labels[rows]}
    found = {"input_ids": data.inputs[rows], "labels": data.labels[rows]}
    if data.lengths is not None:
        place = torch.arange(data.inputs.shape[-1])
        found["attention_mask"] = place < data.lengths[rows][..., None]
    return found


class Batches(Dataset[Inputs]):
    """`steps` batches of `rows` examples; every epoch takes each example at most once.

    What is left of a set in an epoch and fills no batch waits for the next epoch's order.
    """

    def __init__(self, sets: list[Data], rows: int, steps: int, seed: int):
        """Raise ValueError if a set has fewer than `rows` examples."""
        for data in sets:
            if len(data.labels) < rows:
                reject("rows", rows, f"at most {len(data.labels)}, the examples of a set")
        self.sets, self.rows, self.steps, self.seed = sets, rows, steps, seed
        self.per_epoch = sum(len(data.labels) // rows for data in sets)
        self._epoch = lru_cache(maxsize=1)(self._order)

    def _order(self, epoch: int) -> list[tuple[int, Tensor]]:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        batches = [
            (i, rows)
            for i, data in enumerate(self.sets)
            for rows in torch.randperm(len(data.labels), generator=random).split(self.rows)
            if len(rows) == self.rows
        ]
        order = torch.randperm(len(batches), generator=random).tolist()
        return [batches[i] for i in order]

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Inputs:
        epoch, place = divmod(step, self.per_epoch)
        which, rows = self._epoch(epoch)[place]
        return inputs(self.sets[which], rows)
