"""MQAR, copying, and recall in text: what the definitions say of every example."""

import pytest
import torch

from linattn.tasks import copying, recall
from linattn.tasks.examples import UNSCORED, accuracy
from linattn.tasks.mqar import NOISE_TOKENS, mqar


@pytest.mark.parametrize("options", [{}, {"passes": 2}, {"rebound": 3}, {"random_filler": False}])
def test_mqar_asks_every_key_once_for_its_value(options):
    V, N, pairs = 256, 64, 5
    tokens, labels = mqar(200, length=N, pairs=pairs, vocabulary=V, seed=3, **options)
    context = 2 * pairs * options.get("passes", 1) + 2 * options.get("rebound", 0)
    for row, label in zip(tokens, labels, strict=True):
        bound = dict(row[:context].view(-1, 2).tolist())  # the last one told wins
        assert len(bound) == pairs
        assert all(1 <= key < V // 2 <= value < V for key, value in bound.items())
        assert len(set(bound.values())) == pairs
        asked = (label != UNSCORED).nonzero().flatten()
        assert (asked >= context).all()
        assert ((asked - context) % 2 == 0).all()
        assert sorted(row[asked].tolist()) == sorted(bound)
        assert [bound[key] for key in row[asked].tolist()] == label[asked].tolist()
    filler = tokens[:, context:][labels[:, context:] == UNSCORED]
    if options.get("random_filler", True):
        assert filler.unique().numel() > V // 2
    else:
        assert (filler == 0).all()


def test_mqar_passes_and_noise():
    tokens, _ = mqar(50, length=64, pairs=4, vocabulary=128, passes=2)
    assert (tokens[:, :8] == tokens[:, 8:16]).all()
    noisy, labels = mqar(300, length=64, pairs=4, vocabulary=128, noise=6)
    context = noisy[:, :14]
    noise = (context >= 128) & (context < 128 + NOISE_TOKENS)
    assert (noise.sum(1) == 6).all()
    first = noise[:, 0].float().mean()  # six of ten pieces
    assert abs(first - 0.6) < 5 * (0.24 / 300) ** 0.5
    for row, is_noise, whole, label in zip(context, noise, noisy, labels, strict=True):
        bound = dict(row[~is_noise].view(-1, 2).tolist())
        first = (~is_noise).nonzero().flatten()[::2]
        assert not is_noise[first + 1].any()  # a pair is not torn
        asked = label != UNSCORED
        assert [bound[key] for key in whole[asked].tolist()] == label[asked].tolist()


def test_mqar_gaps_follow_the_power_law():
    """P(slot i) in proportion to i^(power - 1), by the first of the draws, pairs = 1."""
    n, slots = 20_000, 20
    _, labels = mqar(n, length=2 + 2 * slots, pairs=1, vocabulary=64, power=0.01)
    found = torch.bincount((labels != UNSCORED).nonzero()[:, 1].sub(2) // 2, minlength=slots) / n
    weights = torch.arange(1, slots + 1, dtype=torch.double) ** -0.99
    expected = weights / weights.sum()
    error = 5 * (expected * (1 - expected) / n).sqrt()  # five standard errors
    assert ((found - expected).abs() < error).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda **how: mqar(300, length=32, pairs=4, **how),
        lambda **how: copying.copy(300, **how),
        lambda **how: copying.selective_copying(300, length=64, **how),
        lambda **how: copying.induction_heads(300, length=64, **how),
    ],
)
def test_a_seed_gives_its_examples_again_and_no_split_those_of_another(make):
    first = make(seed=1)
    assert all((a == b).all() for a, b in zip(first, make(seed=1), strict=True))
    rows = [
        {tuple(row) for row in make(seed=seed, split=split).tokens.tolist()}
        for seed in (1, 2)
        for split in ("train", "validation", "test")
    ]
    assert len(set.union(*rows)) == sum(map(len, rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 63}, "length: got 63; expected an even number >= 16"),
        ({"length": 8}, "length: got 8; expected an even number >= 16"),
        ({"vocabulary": 64}, "vocabulary: got 64; expected more than length = 64"),
        ({"rebound": 5}, "rebound: got 5; expected 0 to pairs = 4"),
        ({"noise": 3}, "noise: got 3; expected an even number"),
        ({"power": 0}, "power: got 0; expected a number > 0"),
        ({"pairs": 0}, "pairs: got 0; expected an int >= 1"),
        ({"split": "dev"}, "split: got 'dev'"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_mqar_refuses_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        mqar(4, **options)


def test_copy_asks_the_second_string_and_its_end():
    tokens, labels = copying.copy(200, shortest=2, longest=9, vocabulary=5)
    seen = set()
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        middle, end = row.index(copying.MIDDLE), row.index(copying.END)
        word = row[1:middle]
        seen.add(len(word))
        assert row[0] == copying.START
        assert row[middle + 1 : end] == word
        assert set(row[end + 1 :]) <= {copying.PAD}
        asked = [i for i, wanted in enumerate(label) if wanted != UNSCORED]
        assert asked == list(range(middle, end))
        assert [label[i] for i in asked] == [*word, copying.END]
    assert seen == set(range(2, 10))


def test_selective_copying_asks_the_data_in_order():
    tokens, labels = copying.selective_copying(100, length=32, data=6, vocabulary=10)
    assert (tokens[:, 32:] == 9).all()
    data = tokens[:, :32][tokens[:, :32] != 8].view(100, 6)
    assert (labels[:, 32:] == data).all()
    assert (labels[:, :32] == UNSCORED).all()


def test_induction_heads_ask_what_followed():
    tokens, labels = copying.induction_heads(200, length=16, vocabulary=6)
    assert ((tokens == 5).sum(1) == 2).all()
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert row[-1] == 5
        assert label[-1] == row[row.index(5) + 1] != 5
        assert set(label[:-1]) == {UNSCORED}


def test_accuracy_is_the_mean_over_examples_and_the_share_all_right():
    labels = torch.tensor([[1, 2, UNSCORED], [3, UNSCORED, UNSCORED], [UNSCORED] * 3])
    predicted = torch.tensor([[1, 0, 0], [3, 3, 3], [0, 0, 0]])
    assert accuracy(predicted, labels) == (0.75, 0.5)
    with pytest.raises(ValueError, match="labels: got no position"):
        accuracy(predicted[2:], labels[2:])


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_passkeys_stand_where_they_shall(depth):
    prompt = recall.passkey(2000, depth=depth, seed=4)
    assert prompt.text.count(prompt.answer) == 2
    assert prompt.text.endswith("The pass key is ")
    head = len("There is an important info hidden inside a lot of irrelevant text. Find it and "
               "memorize it. I will quiz you about it there.\n\nThe pass key is ")  # fmt: skip
    assert prompt.text.index(prompt.answer) == head + round(2000 * depth)
    short = recall.short_passkey(200, depth=depth, digits=4, seed=4)
    assert len(short.text) + len(short.answer) == 200
    assert short.text.count(short.answer) == 1
    where = short.text.index(short.answer)
    assert abs(where - depth * 200) < 20


@pytest.mark.parametrize("kind", recall.NEEDLES)
def test_needles_are_told_and_asked(kind):
    prompts = recall.needle(kind, 3000, depth=0.5, seed=2)
    choice = recall.NEEDLES[kind]
    assert len(prompts) == int(choice.get("values", 1)) * int(choice.get("queries", 1))
    for i, prompt in enumerate(prompts):
        assert prompt.text.count(f"is: {prompt.answer}.") == 1
        assert prompt.text.endswith(" " if i == 0 else f"{prompts[i - 1].answer}, ")
        assert 2700 < len(prompt.text) < 5000
    assert abs(prompts[0].depth - 0.5) < 0.2  # sentences are not of one length
    again = recall.needle(kind, 3000, depth=0.5, seed=2)
    assert again == prompts
    assert recall.needle(kind, 3000, depth=0.5, seed=3) != prompts


@pytest.mark.parametrize("entries", [3, 40, 500])
def test_a_phone_book_holds_the_number_once(entries):
    prompt = recall.phonebook(entries, seed=1)
    lines = prompt.text.splitlines()
    assert len(lines) == entries + 3
    assert len({line.split(":")[0] for line in lines[:entries]}) == entries
    assert set(lines[entries : entries + 2]) < set(lines[:entries])
    assert f"{lines[-1]}{prompt.answer}" in lines[:entries]
    assert len(prompt.answer) == 10
    assert prompt.answer[0] in "6789"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recall.passkey(-1), "characters: got -1"),
        (lambda: recall.passkey(10, depth=2), "depth: got 2"),
        (lambda: recall.passkey(10, digits=0), "digits: got 0"),
        (lambda: recall.short_passkey(5), "length: got 5; expected at least"),
        (lambda: recall.needle("foo", 10), "kind: got 'foo'"),
        (lambda: recall.needle("single_2", 10, essay=" "), "essay: got no words"),
        (lambda: recall.phonebook(2), "entries: got 2"),
    ],
)
def test_recall_refuses_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_short_passkeys_are_the_texts_as_bytes_with_their_digits_asked():
    x = recall.short_passkeys(50, length=80, seed=3)
    assert x.tokens.shape == x.labels.shape == (50, 79)
    for tokens, labels in zip(x.tokens.tolist(), x.labels.tolist(), strict=True):
        text = bytes(tokens).decode()
        asked = [i for i, label in enumerate(labels) if label >= 0]
        assert asked == [74, 75, 76, 77, 78]
        key = bytes(labels[i] for i in asked).decode()
        assert f" KEY {key} " in text[:75]
        assert text[:75].endswith(" KEY ")
        assert text[75:] == key[:-1]
    again = recall.short_passkeys(50, length=80, seed=3)
    other = recall.short_passkeys(50, length=80, seed=3, split="test")
    assert torch.equal(again.tokens, x.tokens)
    rows = {tuple(row) for row in x.tokens.tolist()}
    assert not rows & {tuple(row) for row in other.tokens.tolist()}
