"""ListOps of Long Range Arena (Nangia and Bowman 2018; Tay et al. 2021): nested expressions.

An expression is a digit, or an operator with two to ten expressions: [MAX 4 [MIN 2 9 ] 0 ].
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import torch

from linattn._validation import reject, require_positive_int
from linattn.tasks.examples import Classes
from linattn.tasks.files import delimited

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")  # least, largest, median, sum modulo 10
WORDS = ("<pad>", *OPERATORS, "]", *map(str, range(10)))
TOKEN = {word: i for i, word in enumerate(WORDS)}
CLASSES = 10
MAX_DEPTH, MAX_ARGUMENTS = 10, 10
OPERATOR_SHARE = 0.25
SPLITS = ("train", "validation", "test")

Tree: TypeAlias = "int | tuple[str, list[Tree]]"


class _TooLongError(Exception):
    pass


def expression(draw: random.Random, longest: int) -> Tree | None:
    """Return an expression: an operator with probability 1/4 above depth 10, else a digit.

    None: it has more than `longest` words; most that are long are far too long, so that it is left
    as soon as that is known.
    """
    left = longest

    def grow(depth: int) -> Tree:
        nonlocal left
        inner = depth < MAX_DEPTH and draw.random() < OPERATOR_SHARE
        left -= 2 if inner else 1
        if left < 0:
            raise _TooLongError
        if not inner:
            return draw.randrange(10)
        operator = draw.choice(OPERATORS)
        return operator, [grow(depth + 1) for _ in range(draw.randint(2, MAX_ARGUMENTS))]

    try:
        return grow(1)
    except _TooLongError:
        return None


def value(tree: Tree) -> int:
    """Return what an expression comes to, 0 to 9; the median of an even number rounded down."""
    if isinstance(tree, int):
        return tree
    operator, arguments = tree
    values = sorted(value(argument) for argument in arguments)
    middle = len(values) // 2
    if operator == "[MIN":
        return values[0]
    if operator == "[MAX":
        return values[-1]
    if operator == "[SM":
        return sum(values) % 10
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2


def words(tree: Tree) -> Iterator[str]:
    """Return the words of an expression; an operator's come to 2 and those of its arguments."""
    if isinstance(tree, int):
        yield str(tree)
        return
    yield tree[0]
    for argument in tree[1]:
        yield from words(argument)
    yield "]"


def bracketed(tree: Tree) -> str:
    """Return an expression as the files of Long Range Arena have it: ( ( ( [MAX 4 ) 2 ) ] )."""
    if isinstance(tree, int):
        return str(tree)
    operator, arguments = tree
    text = operator
    for argument in arguments:
        text = f"( {text} {bracketed(argument)} )"
    return f"( {text} ] )"


def listops(
    examples: int,
    *,
    shortest: int = 501,
    longest: int = 1999,
    seed: int = 0,
    split: str = "train",
) -> Classes:
    """Return expressions of shortest to longest words, none twice in a split, and their values.

    The inputs are padded behind to `longest`, tokens as in WORDS. Published: 96,000, 2,000 and
    2,000 examples of 500 < length < 2000. An expression of one split is in no other, for each
    takes those only whose words hash to it.

    Raises:
        ValueError, TypeError: sizes < 1, shortest > longest, an unknown split, or so short that
            there are not as many different ones.
    """
    for name, size in (("examples", examples), ("shortest", shortest), ("longest", longest)):
        require_positive_int(name, size)
    if shortest > longest:
        reject("shortest", shortest, f"at most longest = {longest}")
    if split not in SPLITS:
        reject("split", repr(split), f"one of {SPLITS}")
    draw = random.Random(f"listops {seed} {split}")
    found: dict[tuple[str, ...], int] = {}
    tries = 0
    while len(found) < examples:
        tree = expression(draw, longest)
        tries += 1
        if tree is None:
            continue
        text = tuple(words(tree))
        if shortest <= len(text) <= longest and _split_of(text) == split and text not in found:
            found[text] = value(tree)
            tries = 0
        elif tries > 1_000_000:
            got = f"{examples} examples of {shortest} to {longest} words"
            reject("examples", got, f"fewer: {len(found)} different ones were found")
    return _classes(list(found.items()), longest)


def _split_of(text: tuple[str, ...]) -> str:
    """Return the split of an expression: a fair share of all expressions each."""
    digest = 0
    for word in text:
        digest = (digest * 1_000_003 + TOKEN[word] + 1) % (2**61 - 1)
    return SPLITS[digest % 3]


def _classes(rows: list[tuple[tuple[str, ...], int]], longest: int) -> Classes:
    lengths = torch.tensor([len(text) for text, _ in rows])
    inputs = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, (text, _) in enumerate(rows):
        inputs[i, : len(text)] = torch.tensor([TOKEN[word] for word in text])
    return Classes(inputs, torch.tensor([result for _, result in rows]), lengths)


def read(path: Path, longest: int = 2000) -> Classes:
    """Return the examples of a file of Long Range Arena: TSV with the columns Source and Target.

    Brackets ( and ) are left out, as published; longer examples are cut to `longest` words, as
    published.

    Raises:
        ValueError: no such file or columns, or a word that is none of ListOps'.
    """
    require_positive_int("longest", longest)
    rows = []
    for number, line in enumerate(delimited(path, ("Source", "Target"), "\t"), 2):
        text = tuple(word for word in line["Source"].split() if word not in "()")
        unknown = [word for word in text if word not in TOKEN]
        if unknown or not line["Target"].strip().isdigit():
            got = unknown[0] if unknown else line["Target"]
            reject("path", f"{path}, line {number}, with {got!r}", f"words of {WORDS[1:]}")
        rows.append((text[:longest], int(line["Target"])))
    return _classes(rows, longest)
