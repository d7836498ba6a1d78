"""The Python standard library's own source: real text that every user has."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from linattn._validation import reject, require_tensor

# Installed packages, the interpreter's own tests, and `encodings`: character tables so alike that
# one in the training text would give away one in the held-out text.
WITHOUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)


def source_files(folder: Path) -> list[Path]:
    """Return the .py files of the corpus, sorted, so that the split is the same every time."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if path.is_file() and not WITHOUT & set(path.relative_to(folder).parts[:-1])
    )


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
