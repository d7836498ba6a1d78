"""Multi-query associative recall (Arora et al. 2023, Zoology): pairs first, then their keys."""

from __future__ import annotations

import torch

from linattn._validation import reject, require_bool
from linattn.tasks.examples import (
    UNSCORED,
    Examples,
    draw,
    generator,
    require_sizes,
    weighted_draw,
)

NOISE_TOKENS = 16


def vocabulary_size(vocabulary: int, noise: int) -> int:
    """Return how many tokens there are, those of the noise with them."""
    return vocabulary + (NOISE_TOKENS if noise else 0)


def mqar(
    examples: int,
    *,
    length: int = 64,
    pairs: int = 4,
    vocabulary: int = 8192,
    power: float = 0.01,
    passes: int = 1,
    random_filler: bool = True,
    rebound: int = 0,
    noise: int = 0,
    seed: int = 0,
    split: str = "train",
) -> Examples:
    """Return examples k1 v1 k2 v2 ... with the keys asked again, each once, among filler.

    Keys are drawn of 1 .. V/2 - 1 and values of V/2 .. V - 1, none twice in an example. Behind the
    pairs each key stands once, an even number of tokens further on: at slot i of 1, 2, ... with
    probability in proportion to power i^(power - 1), so that most are asked early and some late.
    Its value is the label there.

    Args:
        examples: how many.
        length: N, even.
        pairs: n; 2 n tokens for every pass, and 2 n for the slots, must fit into N.
        vocabulary: V > N tokens, without those of the noise.
        power: of the gaps' distribution.
        passes: how often the pairs are told.
        random_filler: whether tokens between the keys are random (of all V), or 0.
        rebound: so many of the keys are told again behind the pairs, with another value, the one
            that is then right.
        noise: so many tokens of 16 more kinds stand among the pairs, an even number.
        seed: of all draws.
        split: "train", "validation" or "test": never the same draws.

    Raises:
        ValueError, TypeError: sizes that do not fit.
    """
    require_sizes(
        {
            "examples": examples,
            "length": length,
            "pairs": pairs,
            "vocabulary": vocabulary,
            "passes": passes,
        }
    )
    require_bool("random_filler", random_filler)
    context = 2 * pairs * passes + 2 * rebound + noise
    if length % 2 != 0 or context + 2 * pairs > length:
        expected = f"an even number >= {context + 2 * pairs}, for pairs and queries"
        reject("length", length, expected)
    if vocabulary <= length or vocabulary // 2 - 1 < pairs:
        reject("vocabulary", vocabulary, f"more than length = {length}, and two a pair")
    if not 0 <= rebound <= pairs or vocabulary - vocabulary // 2 < pairs + rebound:
        reject("rebound", rebound, f"0 to pairs = {pairs}, with a value left for each")
    if noise < 0 or noise % 2 != 0:
        reject("noise", noise, "an even number >= 0")
    if not power > 0:
        reject("power", power, "a number > 0")
    random = generator(seed, split)
    half = vocabulary // 2
    keys = 1 + draw(half - 1, pairs, examples, random)
    values = half + draw(vocabulary - half, pairs + rebound, examples, random)
    told = torch.stack([keys, values[:, :pairs]], 2).repeat(1, passes, 1)  # [n, passes pairs, 2]
    right = values[:, :pairs].clone()
    if rebound > 0:
        again = draw(pairs, rebound, examples, random)
        new = values[:, pairs:]
        told = torch.cat([told, torch.stack([keys.gather(1, again), new], 2)], 1)
        right.scatter_(1, again, new)
    tokens = torch.zeros(examples, length, dtype=torch.long)
    tokens[:, :context] = _with_noise(told, noise, vocabulary, random)

    slots = (length - context) // 2
    weights = power * torch.arange(1, slots + 1, dtype=torch.double) ** (power - 1)
    places = context + 2 * weighted_draw(weights, pairs, examples, random)  # [n, pairs]
    tokens.scatter_(1, places, keys)
    labels = torch.full_like(tokens, UNSCORED).scatter_(1, places, right)
    if random_filler:
        filler = torch.randint(vocabulary, tokens.shape, generator=random)
        tokens = torch.where(tokens == 0, filler, tokens)
    return Examples(tokens, labels)


def _with_noise(
    told: torch.Tensor, noise: int, vocabulary: int, random: torch.Generator
) -> torch.Tensor:
    """Return the pairs [n, P, 2] as tokens [n, 2 P + noise], noise between pairs, not inside."""
    n, P, _ = told.shape
    if noise == 0:
        return told.flatten(1)
    # An order of P pairs and `noise` single tokens; a pair moves what is behind it by two.
    is_pair = torch.zeros(n, P + noise, dtype=torch.long)
    is_pair.scatter_(1, draw(P + noise, P, n, random), 1)
    place = (1 + is_pair).cumsum(1) - 1 - is_pair  # of the first token of each
    tokens = vocabulary + torch.randint(NOISE_TOKENS, (n, 2 * P + noise), generator=random)
    first = place[is_pair.bool()].view(n, P)
    tokens.scatter_(1, first, told[:, :, 0])
    return tokens.scatter_(1, first + 1, told[:, :, 1])
