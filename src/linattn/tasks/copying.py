"""Copying, selective copying, induction heads: what a fixed state must hold on to."""

from __future__ import annotations

import torch

from linattn._validation import reject
from linattn.tasks.examples import UNSCORED, Examples, draw, generator, require_sizes

# Of `copy`.
PAD, START, MIDDLE, END, FIRST_LETTER = 0, 1, 2, 3, 4


def copy(
    examples: int,
    *,
    shortest: int = 5,
    longest: int = 20,
    vocabulary: int = 26,
    seed: int = 0,
    split: str = "train",
) -> Examples:
    """Return strings $ s | s . of shortest to longest letters, padded behind (Jelassi et al. 2024).

    Asked is the second s with the end. Tokens: 0 padding, 1 $, 2 |, 3 the end, 4 ... letters.

    Raises:
        ValueError, TypeError: sizes < 1, or shortest > longest.
    """
    require_sizes(
        {"examples": examples, "shortest": shortest, "longest": longest, "vocabulary": vocabulary}
    )
    if shortest > longest:
        reject("shortest", shortest, f"at most longest = {longest}")
    random = generator(seed, split)
    lengths = torch.randint(shortest, longest + 1, (examples, 1), generator=random)
    letters = FIRST_LETTER + torch.randint(vocabulary, (examples, longest), generator=random)
    N = 2 * longest + 3
    tokens = torch.full((examples, N), PAD)
    place = torch.arange(N).expand(examples, N)
    tokens[:, 0] = START
    for first in (torch.ones_like(lengths), lengths + 2):
        inside = (place >= first) & (place < first + lengths)
        source = letters.gather(1, (place - first).clamp(0, longest - 1))
        tokens = torch.where(inside, source, tokens)
    tokens.scatter_(1, lengths + 1, MIDDLE)
    tokens.scatter_(1, 2 * lengths + 2, END)
    following = torch.cat([tokens[:, 1:], torch.full((examples, 1), PAD)], 1)
    asked = (place >= lengths + 1) & (place < 2 * lengths + 2)
    return Examples(tokens, torch.where(asked, following, UNSCORED))


def selective_copying(
    examples: int,
    *,
    length: int = 256,
    data: int = 16,
    vocabulary: int = 16,
    seed: int = 0,
    split: str = "train",
) -> Examples:
    """Return `data` tokens at random places of `length`, blanks between, to be said in order.

    As in Mamba (Gu and Dao 2023) and the MAD protocol: of V tokens V - 1 is the copy marker and
    V - 2 the blank. Behind the sequence stands the marker `data` times, and the answers there.
    N = length + data.

    Raises:
        ValueError, TypeError: sizes < 1, more data than places, fewer than three tokens.
    """
    require_sizes({"examples": examples, "length": length, "data": data, "vocabulary": vocabulary})
    if data > length:
        reject("data", data, f"at most length = {length}")
    if vocabulary < 3:
        reject("vocabulary", vocabulary, "at least 3: data, blank, copy marker")
    random = generator(seed, split)
    words = torch.randint(vocabulary - 2, (examples, data), generator=random)
    places = draw(length, data, examples, random).sort(1).values
    tokens = torch.full((examples, length + data), vocabulary - 2)
    tokens.scatter_(1, places, words)
    tokens[:, length:] = vocabulary - 1
    labels = torch.full_like(tokens, UNSCORED)
    labels[:, length:] = words
    return Examples(tokens, labels)


def induction_heads(
    examples: int,
    *,
    length: int = 256,
    vocabulary: int = 16,
    seed: int = 0,
    split: str = "train",
) -> Examples:
    """Return random tokens with one special token inside and at the end (Gu and Dao 2023).

    Asked at the end is the token that followed the special one, token V - 1. N = length.

    Raises:
        ValueError, TypeError: sizes < 1, fewer than three tokens.
    """
    require_sizes({"examples": examples, "length": length, "vocabulary": vocabulary})
    if length < 3:
        reject("length", length, "at least 3")
    if vocabulary < 3:
        reject("vocabulary", vocabulary, "at least 3")
    random = generator(seed, split)
    special = vocabulary - 1
    tokens = torch.randint(special, (examples, length), generator=random)
    place = torch.randint(length - 2, (examples, 1), generator=random)
    answer = tokens.gather(1, place + 1)
    tokens.scatter_(1, place, special)
    tokens[:, -1] = special
    labels = torch.full_like(tokens, UNSCORED)
    labels[:, -1:] = answer
    return Examples(tokens, labels)
