"""Finding again what was said long ago, in text: passkey, needle in a haystack, phone book.

Every task returns texts that a model goes on from, and the words that must come.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from linattn._validation import reject, require_positive_int
from linattn.tasks.examples import UNSCORED, Examples, generator

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)


class Prompt(NamedTuple):
    """A text and what must follow.

    Attributes:
        text: the model is given.
        answer: what it must say first.
        depth: where the answer stands in the text, 0 (the beginning) to 1.
    """

    text: str
    answer: str
    depth: float


def filler(characters: int) -> str:
    """Return sentences that say nothing, cut to so many characters."""
    return (FILLER * (characters // len(FILLER) + 1))[:characters]


def passkey(
    characters: int, *, depth: float | None = None, digits: int = 5, seed: int = 0
) -> Prompt:
    """Return a key hidden in filler (Mohtashami and Jaggi 2023), told twice and asked at the end.

    Args:
        characters: of filler.
        depth: share of it in front of the key; None: drawn.
        digits: of the key.
        seed: of the draws.

    Raises:
        ValueError: characters < 0, a depth that is no share, digits < 1.
    """
    draw = _random("passkey", characters, seed)
    at, key = _depth(depth, draw), _digits(digits, draw)
    text = filler(characters)
    cut = round(at * characters)
    head = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and "
        "memorize it. I will quiz you about it there.\n"
    )
    info = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    end = "\nWhat is the pass key? The pass key is "
    return Prompt(head + text[:cut] + info + text[cut:] + end, key, at)


def short_passkey(
    length: int, *, depth: float | None = None, digits: int = 5, seed: int = 0
) -> Prompt:
    """Return a passkey of exactly `length` characters in all with its answer, for small models.

    "... KEY 12345 ... KEY " and the answer: what a model of bytes can learn in minutes.

    Raises:
        ValueError: a length that has no room, a depth that is no share, digits < 1.
    """
    require_positive_int("digits", digits)
    around = 2 * len(" KEY ") + digits + 1 + digits
    if length < around:
        reject("length", length, f"at least {around} characters")
    draw = _random("short passkey", length, seed)
    at, key = _depth(depth, draw), _digits(digits, draw)
    start = draw.randrange(len(FILLER))  # the filler begins anywhere
    text = filler(start + length - around)[start:]
    cut = round(at * len(text))
    return Prompt(f"{text[:cut]} KEY {key} {text[cut:]} KEY ", key, at)


def short_passkeys(
    examples: int,
    *,
    length: int = 128,
    depth: float | None = None,
    digits: int = 5,
    seed: int = 0,
    split: str = "train",
) -> Examples:
    """Return passkeys of `length` bytes as `short_passkey`; asked is every digit in turn.

    Raises:
        ValueError: as `short_passkey`, and an unknown split.
    """
    require_positive_int("examples", examples)
    random = generator(seed, split)
    seeds = torch.randint(2**40, (examples,), generator=random).tolist()
    prompts = [short_passkey(length, depth=depth, digits=digits, seed=s) for s in seeds]
    raw = b"".join((p.text + p.answer).encode() for p in prompts)
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long().view(examples, length)
    labels = torch.full((examples, length - 1), UNSCORED)
    labels[:, -digits:] = text[:, -digits:]
    return Examples(text[:, :-1], labels)


# RULER's needles (Hsieh et al. 2024): what hides them, their kind, how many keys, values, queries.
NEEDLES: dict[str, dict[str, int | str]] = {
    "single_1": {"haystack": "noise"},
    "single_2": {"haystack": "essay"},
    "single_3": {"haystack": "essay", "value": "uuids"},
    "multikey_1": {"haystack": "essay", "keys": 4},
    "multikey_2": {"haystack": "needles"},
    "multikey_3": {"haystack": "needles", "value": "uuids"},
    "multivalue": {"haystack": "essay", "values": 4},
    "multiquery": {"haystack": "essay", "keys": 4, "queries": 4},
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ADJECTIVES = "quiet bright hollow gentle rapid wooden distant golden narrow ancient purple hungry"
NOUNS = "river window candle garden engine pencil harbor mirror ladder basket forest anchor"


def needle(
    kind: str,
    characters: int,
    *,
    depth: float | None = None,
    essay: str | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Return RULER's needle in a haystack: a prompt for every value that is asked.

    "One of the special magic numbers for quiet-river is: 1234567." The answers stand in one line
    behind the question; the prompt of the second holds the first, and so on.

    Args:
        kind: a name of NEEDLES.
        characters: about how long the haystack is.
        depth: of the first needle that is asked; None: drawn, as the others always are.
        essay: text for the haystacks that are one; None: the text that comes with Python.
        seed: of the draws.

    Raises:
        ValueError: an unknown kind, characters < 1, a depth that is no share.
    """
    if kind not in NEEDLES:
        reject("kind", repr(kind), f"one of {tuple(NEEDLES)}")
    require_positive_int("characters", characters)
    choice = {"value": "numbers", "keys": 1, "values": 1, "queries": 1, **NEEDLES[kind]}
    draw = _random(f"needle {kind}", characters, seed)
    word = choice["value"]

    def value() -> str:
        if word == "uuids":
            text = f"{draw.getrandbits(128):032x}"
            return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
        return str(draw.randrange(1_000_000, 10_000_000))

    def line(key: str, number: str) -> str:
        return f"One of the special magic {word} for {key} is: {number}."

    used: set[str] = set()

    def key() -> str:
        while True:
            name = f"{draw.choice(ADJECTIVES.split())}-{draw.choice(NOUNS.split())}"
            name = name if len(used) < 100 else f"{name}-{draw.randrange(10**6)}"
            if name not in used:
                used.add(name)
                return name

    keys = [key() for _ in range(int(choice["keys"]))]
    told = {name: [value() for _ in range(int(choice["values"]))] for name in keys}
    if choice["haystack"] == "noise":
        hay = [NOISE] * (characters // len(NOISE) + 1)
    elif choice["haystack"] == "needles":
        hay = [line(key(), value()) for _ in range(characters // len(line("quiet-river", value())))]
    else:
        hay = _sentences(essay, characters)
    needles = [line(name, number) for name, numbers in told.items() for number in numbers]
    at = _depth(depth, draw)
    places = [round(at * len(hay)), *(draw.randrange(len(hay) + 1) for _ in needles[1:])]
    for place, text in sorted(zip(places, needles, strict=True), reverse=True):
        hay.insert(place, text)
    asked = keys[: int(choice["queries"])]
    names = ", ".join(asked)
    text = (
        f"Some special magic {word} are hidden within the following text. Make sure to memorize "
        f"it. I will quiz you about the {word} afterwards.\n" + "\n".join(hay) + f"\nWhat are all "
        f"the special magic {word} for {names} mentioned in the provided text? The special magic "
        f"{word} for {names} mentioned in the provided text are"
    )
    prompts = []
    for number in (number for name in asked for number in told[name]):
        where = text.index(number) / len(text)
        prompts.append(Prompt(text + " ", number, where))
        text += f" {number},"
    return prompts


def phonebook(entries: int, *, seed: int = 0) -> Prompt:
    """Return a phone book of so many lines, two entries of it again, and a name of it.

    The answer is the ten digits of that name (De et al. 2024, Griffin; Jelassi et al. 2024).

    Raises:
        ValueError: entries not in 3 .. 100,000.
    """
    require_positive_int("entries", entries)
    first, last = ADJECTIVES.title().split(), NOUNS.title().split()
    if not 3 <= entries <= 100_000:
        reject("entries", entries, "3 to 100,000")
    draw = _random("phonebook", entries, seed)
    names: dict[str, str] = {}
    while len(names) < entries:
        name = f"{draw.choice(first)} {draw.choice(last)}"
        if entries > 50:  # more names than twelve times twelve
            name += f"{draw.choice('aeiou')}{draw.choice('lmnrst')}{draw.randrange(entries)}"
        if name not in names:
            names[name] = draw.choice("6789") + _digits(9, draw)
    book = list(names.items())
    *examples, asked = draw.sample(range(entries), 3)
    lines = [f"{name}: {number}\n" for name, number in [*book, *(book[i] for i in examples)]]
    name, number = book[asked]
    text = "".join(lines)
    return Prompt(f"{text}{name}: ", number, text.index(number) / len(text))


def _sentences(essay: str | None, characters: int) -> list[str]:
    if essay is None:
        import pydoc_data.topics

        essay = " ".join(
            pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)
        )
    words = " ".join(essay.split())
    if not words:
        reject("essay", "no words", "text")
    words = (words + " ") * (characters // len(words) + 1)
    return [f"{part.strip()}." for part in words[:characters].split(". ")]


def _random(task: str, size: int, seed: int) -> random.Random:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        reject("characters", repr(size), "an int >= 0")
    return random.Random(f"{task} {size} {seed}")


def _depth(depth: float | None, draw: random.Random) -> float:
    if depth is None:
        return draw.random()
    if not 0 <= depth <= 1:
        reject("depth", depth, "0 (the beginning) to 1 (the end)")
    return depth


def _digits(digits: int, draw: random.Random) -> str:
    require_positive_int("digits", digits)
    return "".join(draw.choice("0123456789") for _ in range(digits))
