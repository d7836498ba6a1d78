"""Text to train a language model on: documents, tokens, and batches of packed windows."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from linattn._validation import reject, require_positive_int
from linattn.tasks.standard_library import source_files

Encode = Callable[[str], list[int]]
HELD_OUT_EVERY = 20  # documents; of a single one the last twentieth is held out


@dataclass(frozen=True)
class Corpus:
    """Tokens of documents, one after another."""

    tokens: Tensor  # [n] int32
    starts: Tensor  # [documents] int64: where each begins
    num_bytes: int  # of the text

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for, on average."""
        return self.num_bytes / self.tokens.numel()

    def first(self, documents: int) -> Corpus:
        """Return the first documents, with their share of the bytes."""
        if documents >= self.starts.numel():
            return self
        tokens = self.tokens[: int(self.starts[documents])]
        return Corpus(tokens, self.starts[:documents], round(tokens.numel() * self.bytes_per_token))

    @functools.cached_property
    def digest(self) -> str:
        """A short text that another text does not have; hashed once, not at every checkpoint."""
        found = hashlib.sha256(self.tokens.numpy().tobytes())
        found.update(self.starts.numpy().tobytes())
        return found.hexdigest()[:16]


class Batch(NamedTuple):
    """Windows of text packed in one row; a document that begins inside begins a sequence."""

    tokens: Tensor  # [1, rows * length] int64
    cu_seqlens: Tensor  # [sequences + 1] int64

    @property
    def scored(self) -> int:
        """Tokens that have one in front of them in their sequence, to be predicted from."""
        return self.tokens.shape[1] - (self.cu_seqlens.numel() - 1)


def load(source: Path | None, encode: Encode | None) -> tuple[Corpus, Corpus]:
    """Return the text to train on and the text held out.

    Args:
        source: a text file, one document, whose last twentieth is held out; a folder, whose
            every text file is a document, every twentieth of them held out; None: the source of
            Python's standard library.
        encode: text to tokens; None: its bytes in UTF-8.

    Raises:
        ValueError: no such file, a file that is no UTF-8 text, or too few documents.
    """
    if source is not None and not source.exists():
        reject("data", source, "a text file or a folder of them")
    if source is not None and source.is_file():
        text = _text(source)
        if text is None:
            reject("data", f"{source}, no text in UTF-8", "a text file or a folder of them")
        assert text is not None
        cut = len(text) - len(text) // HELD_OUT_EVERY
        return _corpus([text[:cut]], encode, source), _corpus([text[cut:]], encode, source)
    if source is None:
        source = Path(sysconfig.get_paths()["stdlib"])
        files = source_files(source)
    else:
        files = sorted(p for p in source.rglob("*") if p.is_file() and not _hidden(p, source))
    texts = [text for text in map(_text, files) if text]
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        expected = f"at least {HELD_OUT_EVERY}, to hold one out; or a single file"
        reject("data", f"{source} with {len(texts)} text files", expected)
    train = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return _corpus(train, encode, source), _corpus(held_out, encode, source)


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _text(path: Path) -> str | None:
    """Return the text of a file; None if it is not UTF-8 or holds a byte 0, as no text does."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _corpus(texts: list[str], encode: Encode | None, source: Path) -> Corpus:
    raw = [text.encode() for text in texts]
    if encode is None:
        parts = [torch.frombuffer(bytearray(r), dtype=torch.uint8).int() for r in raw if r]
    else:
        parts = [torch.tensor(encode(text), dtype=torch.int32) for text in texts]
    parts = [part for part in parts if part.numel() > 0]
    if not parts:
        reject("data", f"{source} without text in one part of the split", "more text")
    sizes = torch.tensor([0, *(part.numel() for part in parts)])
    return Corpus(torch.cat(parts), sizes.cumsum(0)[:-1], sum(map(len, raw)))


def batch(corpus: Corpus, rows: int, length: int, index: int, seed: int) -> Batch:
    """Return batch number `index`: the same for the same arguments, whatever came before.

    Every epoch goes through all windows of `length` tokens once, in an order and with a first
    token of its own.

    Raises:
        ValueError: rows or length < 1, or a text shorter than one batch.
    """
    require_positive_int("rows", rows)
    require_positive_int("length", length)
    batches = (corpus.tokens.numel() // length - 1) // rows  # one window less: the shift
    if batches < 1:
        got = f"{corpus.tokens.numel():,} tokens of text"
        reject("data", got, f"at least (rows + 1) length = {(rows + 1) * length:,}")
    epoch, number = divmod(index, batches)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shift = int(torch.randint(length, (1,), generator=generator))
    order = torch.randperm(batches * rows, generator=generator)
    return windows(corpus, shift + length * order[number * rows : (number + 1) * rows], length)


def spread(corpus: Corpus, rows: int, length: int) -> Batch:
    """Return `rows` windows spread evenly over the text, fewer where it is short, to score.

    Raises:
        ValueError: rows or length < 1, or a text shorter than one window.
    """
    require_positive_int("rows", rows)
    require_positive_int("length", length)
    n = corpus.tokens.numel()
    if n < length:
        reject("data", f"{n:,} tokens held out", f"at least length = {length:,}")
    rows = min(rows, n // length)
    return windows(corpus, torch.arange(rows) * (n - length) // max(1, rows - 1), length)


def windows(corpus: Corpus, first: Tensor, length: int) -> Batch:
    """Return the windows of `length` tokens that begin at first [rows], packed in one row."""
    tokens = corpus.tokens[first[:, None] + torch.arange(length)].long().flatten()[None]
    bounds = [torch.tensor([0])]
    for row, start in enumerate(first.tolist()):
        i, j = torch.searchsorted(corpus.starts, torch.tensor([start + 1, start + length]))
        inside = corpus.starts[i:j] - start  # 1 .. length - 1
        bounds.append(row * length + torch.cat([inside, torch.tensor([length])]))
    return Batch(tokens, torch.cat(bounds))
