"""How well a language model finds again what stood somewhere in a long text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from linattn._validation import reject, require_positive_int, require_seed
from linattn.evaluate.models import check_length
from linattn.tasks import recall as prompts
from linattn.tasks.recall import Prompt

KINDS = (
    "passkey", "short-passkey", "phonebook", *(f"needle-{name}" for name in prompts.NEEDLES)
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """Answers at one length and depth.

    Attributes:
        length: characters of text; of a phone book its entries.
        depth: share of the text in front of what is asked; None: it stands anywhere.
        answers: how many were asked.
        exact: share of answers that were right as a whole.
        tokens: share of the answers' tokens that were right, each given the right ones in front
            of it; with generation as `exact`.
    """

    length: int
    depth: float | None
    answers: int
    exact: float
    tokens: float


def make(kind: str, length: int, depth: float | None, seed: int) -> list[Prompt]:
    """Return the prompts of a text: one, or of several needles one each.

    Raises:
        ValueError: an unknown kind, or what the task refuses.
    """
    if kind == "passkey":
        return [prompts.passkey(length, depth=depth, seed=seed)]
    if kind == "short-passkey":
        return [prompts.short_passkey(length, depth=depth, seed=seed)]
    if kind == "phonebook":
        return [prompts.phonebook(length, seed=seed)]
    if kind not in KINDS:
        reject("kind", repr(kind), f"one of {KINDS}")
    return prompts.needle(kind.removeprefix("needle-"), length, depth=depth, seed=seed)


@torch.inference_mode()
def grid(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    lengths: Iterable[int],
    depths: Iterable[float],
    *,
    trials: int = 20,
    generated: int = 0,
    seed: int = 0,
    tell: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Return a cell for every length and depth; a phone book has no depths.

    Args:
        model: a language model of transformers.
        tokenizer: its tokenizer.
        kind: one of KINDS.
        lengths: characters of filler around a passkey or needles, of all of a short passkey;
            entries of a phone book.
        depths: shares of the text, 0 (the beginning) to 1.
        trials: texts in a cell.
        generated: 0: an answer is right if every token of it is the likeliest, which is what
            greedy decoding would say. Else so many tokens are generated, and right is a passkey
            that is the first integer among them, or an answer that is among them.
        seed: of the texts.
        tell: called with every cell.

    Raises:
        ValueError: an unknown kind, lengths or depths that the task refuses, trials < 1.
    """
    require_positive_int("trials", trials)
    require_seed(seed)
    if isinstance(generated, bool) or not isinstance(generated, int) or generated < 0:
        reject("generated", repr(generated), "an int >= 0")
    places: list[float | None] = [None] if kind == "phonebook" else list(depths)
    cells = []
    for length in lengths:
        for depth in places:
            answers = [
                _answer(model, tokenizer, prompt, kind, generated)
                for trial in range(trials)
                for prompt in make(kind, length, depth, seed + trial)
            ]
            exact, tokens = (sum(x) / len(answers) for x in zip(*answers, strict=True))
            cells.append(Cell(length, depth, len(answers), exact, tokens))
            if tell is not None:
                tell(cells[-1])
    return cells


def _answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, kind: str, generated: int
) -> tuple[float, float]:
    """Return whether an answer is right, and which share of its tokens."""
    text = tokenizer(prompt.text)["input_ids"]
    answer = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
    check_length("length", model, len(text) + max(len(answer), generated))
    if generated > 0:
        given = torch.tensor([text], device=model.device)
        made = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=generated, do_sample=False
        )
        said = str(tokenizer.decode(made[0, len(text) :]))
        first = re.search(r"\d+", said)
        right = prompt.answer in said
        if kind in ("passkey", "short-passkey"):
            right = first is not None and first.group() == prompt.answer
        return float(right), float(right)
    given = torch.tensor([[*text, *answer]], device=model.device)
    logits = model(input_ids=given[:, :-1], use_cache=False, logits_to_keep=len(answer)).logits[0]
    right = logits.argmax(-1) == given[0, -len(answer) :]
    return float(right.all()), float(right.float().mean())


def table(cells: list[Cell]) -> tuple[np.ndarray, list[int], list[float | None]]:
    """Return exact [depths, lengths] with both axes."""
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells}, key=lambda d: -1 if d is None else d)
    values = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        values[depths.index(cell.depth), lengths.index(cell.length)] = cell.exact
    return values, lengths, depths


def rows(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return the cells for JSON."""
    return [asdict(cell) for cell in cells]
