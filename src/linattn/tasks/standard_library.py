"""The Python standard library's own source as a byte corpus: real text that every user has."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from linattn._validation import reject, require_tensor

# Installed packages, the interpreter's own tests, and `encodings`: character tables so alike that
# one in the training text would give away one in the held-out text.
WITHOUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, from different files; uint8 [length] each."""

    train: Tensor
    held_out: Tensor


def load(folder: Path | None = None, held_out_every: int = 10) -> Corpus:
    """Read the .py files below folder (default: the standard library), in sorted order.

    Every `held_out_every`-th file is held out. The folders in `WITHOUT` are left out.

    Raises:
        ValueError: held_out_every < 2, or too few files there to hold one out, or only empty ones.
    """
    if held_out_every < 2:
        reject("held_out_every", held_out_every, "an int >= 2")
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: tuple[list[Path], list[Path]] = ([], [])
    for i, path in enumerate(source_files(folder)):
        parts[i % held_out_every == held_out_every - 1].append(path)
    train, held_out = (_read(files, folder) for files in parts)
    return Corpus(train, held_out)


def source_files(folder: Path) -> list[Path]:
    """Return the .py files of the corpus, sorted, so that the split is the same every time."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if path.is_file() and not WITHOUT & set(path.relative_to(folder).parts[:-1])
    )


def _read(files: list[Path], folder: Path) -> Tensor:
    text = b"\n".join(path.read_bytes() for path in files)
    if not text:
        reject("folder", f"{folder} without text in one half of the split", "more .py files")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)  # [length]


def bigram_entropy(text: Tensor) -> float:
    """Return H(next byte | byte) of the pairs in the rows of text, in bits a byte.

    sum_ab p(a, b) log2(p(a) / p(a, b)), p the relative frequencies in `text` itself. No predictor
    that sees one byte only does better on this text, and a real one, fitted elsewhere, does worse:
    a language model below it has learned from context. Pairs do not cross rows.

    Args:
        text: bytes [N] or [rows, N], N >= 2; any integer dtype.

    Raises:
        ValueError: rows of fewer than two bytes, or none.
    """
    require_tensor("text", text)
    if text.dim() not in (1, 2) or text.shape[-1] < 2 or text.numel() == 0:
        reject("text", f"shape {list(text.shape)}", "[N] or [rows, N] with N >= 2")
    pairs = text[..., :-1].long() * 256 + text[..., 1:].long()
    joint = torch.bincount(pairs.flatten(), minlength=256 * 256).double().view(256, 256)
    joint /= joint.sum()
    first = joint.sum(1, keepdim=True)
    bits = torch.where(joint > 0, joint * (joint / first).log2(), 0)
    return -float(bits.sum())


def batch(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `rows` windows of length + 1 bytes at random places, int64 [rows, length + 1].

    Raises:
        ValueError: rows or length < 1, or text shorter than one window.
    """
    last = _last_start(text, rows, length)
    starts = torch.randint(last + 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()


def spread(text: Tensor, rows: int, length: int) -> Tensor:
    """Return `rows` windows as `batch` does, but evenly spread, the same every time, to score.

    Fewer rows, without overlap, where the text is shorter than all of them together.

    Raises:
        ValueError: rows or length < 1, or text shorter than one window.
    """
    last = _last_start(text, rows, length)
    rows = min(rows, text.numel() // (length + 1))
    starts = torch.arange(rows) * last // max(1, rows - 1)
    return text[starts[:, None] + torch.arange(length + 1)].long()


def _last_start(text: Tensor, rows: int, length: int) -> int:
    for name, value in (("rows", rows), ("length", length)):
        if value < 1:
            reject(name, value, "an int >= 1")
    if text.numel() < length + 1:
        reject("text", f"{text.numel()} bytes", f"at least length + 1 = {length + 1}")
    return text.numel() - (length + 1)
