"""Perplexity and bits per byte of text, at a stated context length and stride."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from linattn._validation import reject, require_positive_int
from linattn.evaluate.models import check_length
from linattn.tasks.language import Corpus


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text.

    Attributes:
        nats: sum of -log p over the tokens scored.
        tokens: how many were scored: all but the first of each document.
        bytes_per_token: of the text.
        context, stride: tokens.
    """

    nats: float
    tokens: int
    bytes_per_token: float
    context: int
    stride: int

    @property
    def perplexity(self) -> float:
        """Exp of the mean loss."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf  # of what a float holds

    @property
    def bits_per_byte(self) -> float:
        """Bits for a byte of the text."""
        return self.nats / self.tokens / math.log(2) / self.bytes_per_token


class _Window(NamedTuple):
    first: int  # of its tokens
    last: int
    scored: int  # from this token on


def windows(first: int, last: int, context: int, stride: int) -> list[_Window]:
    """Return the windows of a document, tokens first to last - 1: each token is scored once.

    Every window has at most `context` tokens and begins `stride` after the one before it; scored
    is what the one before it did not reach. The document's first token is not scored.
    """
    found = []
    scored = first + 1
    for begin in range(first, last, stride):
        end = min(begin + context, last)
        if end > scored:
            found.append(_Window(begin, end, scored))
            scored = end
        if end == last:
            break
    return found


@torch.inference_mode()
def perplexity(
    model: Any,
    text: Corpus,
    *,
    context: int = 1024,
    stride: int | None = None,
    rows: int = 8,
    tell: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Return the perplexity of a text whose documents are kept apart.

    Args:
        model: a language model of transformers.
        text: tokens and where documents begin.
        context: tokens of a window; a token has at most context - 1 in front of it.
        stride: tokens between the beginnings of two windows; None: context, windows side by side.
            A small one scores every token with almost the whole context, at context / stride
            times the cost.
        rows: windows at a time.
        tell: called with windows done and their number.

    Raises:
        ValueError: context < 2, a stride that is not in 1 .. context - 1 (or context), no token to
            score.
    """
    require_positive_int("context", context)
    require_positive_int("rows", rows)
    check_length("context", model, context)
    stride = context if stride is None else stride
    require_positive_int("stride", stride)
    if context < 2:
        reject("context", context, "at least 2: one token to predict from")
    if stride > context:
        reject("stride", stride, f"at most context = {context}")
    # Side by side, the first token of each window would have nothing in front of it: share one.
    step = min(stride, context - 1)
    bounds = [*text.starts.tolist(), text.tokens.numel()]
    parts = [
        window for first, last in pairwise(bounds) for window in windows(first, last, context, step)
    ]
    if not parts:
        reject("text", f"{text.tokens.numel()} tokens", "a document of at least two")
    nats, tokens = 0.0, 0
    for done in range(0, len(parts), rows):
        group = parts[done : done + rows]
        padded = pad_sequence([text.tokens[w.first : w.last].long() for w in group], True)
        logits = model(input_ids=padded.to(model.device), use_cache=False).logits
        nats += sum(_nats(logits[i], padded[i], w) for i, w in enumerate(group))
        tokens += sum(w.last - w.scored for w in group)
        if tell is not None:
            tell(min(done + rows, len(parts)), len(parts))
    return Perplexity(nats, tokens, text.bytes_per_token, context, stride)


def _nats(logits: Tensor, tokens: Tensor, window: _Window) -> float:
    """Return the loss of a window's scored tokens; padding stands behind them."""
    begin, end = window.scored - window.first, window.last - window.first
    loss = nn.functional.cross_entropy(
        logits[begin - 1 : end - 1].float(), tokens[begin:end].to(logits.device), reduction="sum"
    )
    return float(loss)
