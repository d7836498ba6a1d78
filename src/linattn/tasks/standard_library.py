"""The Python standard library's own source as a byte corpus: real text that every user has."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from linattn._validation import reject


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, from different files; uint8 [length] each."""

    train: Tensor
    held_out: Tensor


def load(folder: Path | None = None, held_out_every: int = 10) -> Corpus:
    """Read every .py file below folder (default: the standard library) in sorted order.

    Every `held_out_every`-th file is held out. Installed packages and the interpreter's own tests
    are left out.

    Raises:
        ValueError: fewer than two files are there.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    without = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not without & set(path.relative_to(folder).parts[:-1])
    )
    if len(files) < 2:
        reject("folder", f"{folder} with {len(files)} .py files", "at least 2 files")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, path in enumerate(files):
        held_out = i % held_out_every == held_out_every - 1 or (i == 1 and len(files) < 10)
        parts[held_out].append(path.read_bytes())
    train, rest = (torch.frombuffer(bytearray(b"\n".join(p)), dtype=torch.uint8) for p in parts)
    return Corpus(train, rest)


def bigram_entropy(text: Tensor) -> float:
    """Return H(next byte | byte) of text itself, in bits a byte, from its own bigram counts.

    The loss of the best possible predictor that sees one byte, fitted to the very text it is
    scored on: a simple baseline that a language model must beat to have learned context.

    Raises:
        ValueError: fewer than two bytes.
    """
    if text.numel() < 2:
        reject("text", f"{text.numel()} bytes", "at least 2")
    pairs = text[:-1].long() * 256 + text[1:].long()
    joint = torch.bincount(pairs, minlength=65536).double().view(256, 256)
    joint /= joint.sum()
    first = joint.sum(1, keepdim=True)
    bits = torch.where(joint > 0, joint * (joint / first).log2(), 0)
    return -float(bits.sum())


def batch(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return rows windows of length + 1 bytes at random places, int64 [rows, length + 1].

    Raises:
        ValueError: the text is shorter than one window.
    """
    last = text.numel() - (length + 1)
    if last < 0:
        reject("text", f"{text.numel()} bytes", f"at least {length + 1}")
    starts = torch.randint(last + 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
