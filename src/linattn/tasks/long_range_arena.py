"""Long Range Arena (Tay et al. 2021): its text from the user's files; two settings, never mixed.

ListOps is in listops.py, Pathfinder in pathfinder.py, CIFAR-10 and Pathfinder's files in images.py.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from linattn._validation import reject, require_positive_int
from linattn.tasks.examples import Classes, generator
from linattn.tasks.files import require_file, require_folder

BYTE_TOKENS = 257  # 0: padding, then the bytes


@dataclass(frozen=True)
class Setting:
    """How a task is trained in one of the published settings.

    Attributes:
        layers, dim, feed_forward, heads: of the model.
        dropout: of each part's output.
        learning_rate, weight_decay, schedule, warm_up, steps, rows: of AdamW; the schedule
            "linear" or "cosine", both after a warm-up.
        evaluate_every: steps; the weights of the best validation score are tested.
        learned_positions, bidirectional: of the model.
    """

    layers: int
    dim: int
    feed_forward: int
    heads: int
    dropout: float
    learning_rate: float
    weight_decay: float
    schedule: str
    warm_up: int
    steps: int
    rows: int
    evaluate_every: int
    learned_positions: bool
    bidirectional: bool = True


def _nystromformer(rows: int, warm_up: int, steps: int, every: int) -> Setting:
    return Setting(2, 64, 128, 2, 0.1, 1e-4, 0.0, "linear", warm_up, steps, rows, every, True)


def _s4(dim: int, rate: float, rows: int, steps: int, warm_up: int, drop: float = 0.0) -> Setting:
    return Setting(
        6, dim, 2 * dim, dim // 64, drop, rate, 0.05, "cosine", warm_up, steps, rows, 1000, False
    )


# The small Transformer of Nystromformer's code (Xiong et al. 2021), used by *Making Linear
# Attention Usable*; and the deep one of S4 (Gu et al. 2022), whose warm-ups are a tenth.
SETTINGS: dict[str, dict[str, Setting]] = {
    "nystromformer": {
        "listops": _nystromformer(32, 1000, 5000, 50),
        "imdb": _nystromformer(32, 8000, 20_000, 500),
        "aan": _nystromformer(32, 800, 30_000, 300),
        "cifar10": _nystromformer(256, 175, 35_000, 175),
        "pathfinder": _nystromformer(256, 312, 62_400, 312),
    },
    "s4": {
        "listops": _s4(256, 0.01, 32, 120_000, 12_000),
        "imdb": _s4(256, 0.01, 16, 50_000, 5000),
        "aan": _s4(256, 0.01, 64, 50_000, 5000),
        "cifar10": _s4(512, 0.01, 50, 180_000, 18_000, 0.1),
        "pathfinder": _s4(256, 0.004, 64, 500_000, 50_000),
        "path_x": _s4(256, 1e-3, 16, 500_000, 50_000),
    },
}


def encode(text: bytes, longest: int) -> tuple[Tensor, int]:
    """Return the bytes as tokens 1 to 256, padded behind with 0 to `longest`, and how many."""
    cut = text[:longest]
    tokens = torch.zeros(longest, dtype=torch.long)
    tokens[: len(cut)] = torch.frombuffer(bytearray(cut), dtype=torch.uint8).long() + 1
    return tokens, len(cut)


def imdb(folder: Path, *, split: str = "train", longest: int = 4096, seed: int = 0) -> Classes:
    """Return reviews as bytes and 1 for a good one, from the folder `aclImdb`.

    As published the validation examples are those of the test. Reviews are cut to `longest`.

    Raises:
        ValueError: folders that are missing, no review, an unknown split.
    """
    require_positive_int("longest", longest)
    random = generator(seed, split)
    part = folder / ("train" if split == "train" else "test")
    require_folder(part, "pos", "neg")
    rows = []
    for label, name in enumerate(("neg", "pos")):
        for path in sorted((part / name).glob("*.txt")):
            text = path.read_bytes()
            if text:
                rows.append((*encode(text, longest), label))
    if not rows:
        reject("path", f"{part} without a review", "files pos/*.txt and neg/*.txt")
    order = torch.randperm(len(rows), generator=random).tolist()
    tokens, lengths, labels = zip(*(rows[i] for i in order), strict=True)
    return Classes(torch.stack(tokens), torch.tensor(labels), torch.tensor(lengths))


AAN_FILES = {"train": "train", "validation": "eval", "test": "test"}


def aan(folder: Path, *, split: str = "train", longest: int = 4000) -> Classes:
    """Return pairs of papers [n, 2, longest] as bytes and 1 where one cites the other.

    From new_aan_pairs.train.tsv, .eval.tsv and .test.tsv: class, two names and two texts a line.
    Texts are cut to `longest`.

    Raises:
        ValueError: a file that is missing, a line of another form, an unknown split.
    """
    require_positive_int("longest", longest)
    generator(0, split)
    path = folder / f"new_aan_pairs.{AAN_FILES[split]}.tsv"
    require_file(path)
    csv.field_size_limit(2**31 - 1)
    tokens, lengths, labels = [], [], []
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.reader(file, delimiter="\t"), 1):
            if len(line) != 5 or line[0] not in ("0", "1", "0.0", "1.0") or not all(line[3:]):
                got = f"{path}, line {number}, of {len(line)} columns"
                reject("path", got, "0 or 1, two names, two texts")
            pair = [encode(text.encode(), longest) for text in line[3:]]
            tokens.append(torch.stack([pair[0][0], pair[1][0]]))
            lengths.append([pair[0][1], pair[1][1]])
            labels.append(int(float(line[0])))
    if not labels:
        reject("path", f"{path} without a line", "at least one pair")
    return Classes(torch.stack(tokens), torch.tensor(labels), torch.tensor(lengths))
