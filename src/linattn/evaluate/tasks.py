"""The tasks that `linattn eval` trains a mixer on: their data, and what a model of them needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn._validation import reject
from linattn.tasks import copying, images, listops, long_range_arena, mqar, pathfinder, recall
from linattn.tasks.examples import Classes, Examples

Data = Examples | Classes
_CLASSIFIER = {"num_hidden_layers": 2, "bidirectional": True}


@dataclass(frozen=True)
class Task:
    """Data and the model's side of it.

    Attributes:
        make: returns examples; takes split, and seed and examples where it draws.
        vocabulary: tokens, of the options that `make` was given.
        model: options of `LinattnConfig` where they are not those of every task.
        from_path: whether the first argument of `make` is the user's file or folder.
        per_split: how many examples to draw of each split unless told otherwise.
    """

    make: Callable[..., Data]
    vocabulary: Callable[[dict[str, Any]], int]
    model: dict[str, Any] = field(default_factory=dict)
    from_path: bool = False
    per_split: dict[str, int] = field(
        default_factory=lambda: {"train": 20_000, "validation": 500, "test": 1000}
    )

    def options(self) -> dict[str, Any]:
        """Return the options of the data with their defaults."""
        own = inspect.signature(self.make).parameters.values()
        return {
            p.name: p.default
            for p in own
            if p.kind is p.KEYWORD_ONLY and p.name not in ("seed", "split", "drawing")
        }

    def data(
        self, split: str, options: dict[str, Any], number: int | None, seed: int, path: Path | None
    ) -> Data:
        """Return the examples of a split, `number` of them where the task draws.

        Raises:
            ValueError, TypeError: what the task refuses.
        """
        keywords = {"split": split, **options}
        takes = inspect.signature(self.make).parameters
        if "seed" in takes:
            keywords["seed"] = seed
        if self.from_path:
            assert path is not None
            return self.make(path, **keywords)
        if "examples" not in takes:
            return self.make(**keywords)
        return self.make(number or self.per_split[split], **keywords)


def _listops_files(folder: Path, *, split: str, longest: int = 2000) -> Classes:
    """Return basic_train.tsv, basic_val.tsv or basic_test.tsv of Long Range Arena's release."""
    name = {"train": "train", "validation": "val", "test": "test"}.get(split, split)
    return listops.read(folder / f"basic_{name}.tsv", longest)


def _path_x(examples: int, *, seed: int = 0, split: str = "train") -> Classes:
    return pathfinder.pathfinder(
        examples, drawing=pathfinder.PATH_X, seed=seed, split=split
    )  # fmt: skip


def _image(size: int, classes: int) -> dict[str, Any]:
    grey = {"image_size": size, "pixel_embedding": "table", "num_labels": classes}
    return {**_CLASSIFIER, **grey}


def _words(options: dict[str, Any]) -> int:
    return len(listops.WORDS)


def _bytes(options: dict[str, Any]) -> int:
    return 256


def _padded_bytes(options: dict[str, Any]) -> int:
    return long_range_arena.BYTE_TOKENS


_LISTOPS = {**_CLASSIFIER, "num_labels": listops.CLASSES}
TASKS: dict[str, Task] = {
    "mqar": Task(mqar.mqar, lambda o: mqar.vocabulary_size(o["vocabulary"], o["noise"])),
    "copy": Task(copying.copy, lambda o: copying.FIRST_LETTER + o["vocabulary"]),
    "selective-copying": Task(copying.selective_copying, lambda o: o["vocabulary"]),
    "induction-heads": Task(copying.induction_heads, lambda o: o["vocabulary"]),
    "passkey": Task(recall.short_passkeys, _bytes),
    "listops": Task(listops.listops, _words, _LISTOPS),
    "listops-files": Task(_listops_files, _words, _LISTOPS, True),
    "digits": Task(images.digits, _bytes, _image(8, 10)),
    "cifar10": Task(images.cifar10, _bytes, _image(32, 10), True),
    "pathfinder": Task(pathfinder.pathfinder, _bytes, _image(32, 2)),
    "path-x": Task(_path_x, _bytes, _image(128, 2)),
    "pathfinder-files": Task(images.pathfinder_files, _bytes, _image(32, 2), True),
    "imdb": Task(long_range_arena.imdb, _padded_bytes, {**_CLASSIFIER, "num_labels": 2}, True),
    "aan": Task(
        long_range_arena.aan, _padded_bytes,
        {**_CLASSIFIER, "num_labels": 2, "two_towers": True}, True,
    ),
}  # fmt: skip


def get(name: str) -> Task:
    """Return a task by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in TASKS:
        reject("task", repr(name), f"one of {tuple(TASKS)}")
    return TASKS[name]
