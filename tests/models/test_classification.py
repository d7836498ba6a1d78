"""Classifiers: pooling, padding, pairs, both directions, images."""

import pytest
import torch
from tiny import config, tokens
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from linattn.models import LinattnForImageClassification, LinattnForSequenceClassification

MIXERS = ("metala", "linear", "softmax", "gated_delta_net", "hybrid")


def make(kind, **changes):
    torch.manual_seed(0)
    made = LinattnForSequenceClassification(config(kind, num_labels=3, **changes)).eval()
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
    return made


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize(
    ("pooling", "bidirectional"), [("mean", False), ("mean", True), ("cls", True), ("last", False)]
)
def test_padding_on_either_side_changes_nothing(kind, pooling, bidirectional):
    m = make(kind, pooling=pooling, bidirectional=bidirectional)
    short, long = tokens(1, 5), tokens(1, 9)
    alone = torch.cat([m(short).logits, m(long).logits])
    pad, off = torch.full((1, 4), 7), torch.zeros(1, 4, dtype=torch.long)
    for left in (True, False):
        row = torch.cat([pad, short] if left else [short, pad], 1)
        there = torch.cat([off, torch.ones(1, 5)] if left else [torch.ones(1, 5), off], 1)
        mask = torch.cat([there, torch.ones(1, 9)]).long()
        close(m(torch.cat([row, long]), attention_mask=mask).logits, alone)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_bidirectional_model_sees_what_comes_later(kind):
    x = tokens(1, 9)
    other = x.clone()
    other[0, -1] = (x[0, -1] % 49) + 1
    for both, equal in ((False, True), (True, False)):
        m = make(kind, pooling="mean", bidirectional=both)
        a, b = (m.model(y, use_cache=False).last_hidden_state[:, :8] for y in (x, other))
        assert torch.allclose(a, b, atol=1e-6) is equal


def test_pairs_are_read_alike_and_judged_together():
    m = make("metala", two_towers=True, bidirectional=True)
    x = tokens(3, 2, 7)
    mask = torch.ones_like(x)
    mask[0, 1, 4:] = 0
    logits = m(x, attention_mask=mask).logits
    assert logits.shape == (3, 3)
    vectors = [m.model(x[0, 0:1]).last_hidden_state.mean(1), None]
    vectors[1] = m.model(x[0, 1:2, :4]).last_hidden_state.mean(1)
    a, b = vectors
    close(m.score(m.pair(torch.cat([a, b, a * b, a - b], -1))), logits[:1])
    with pytest.raises(ValueError, match=r"input_ids: got shape \[3, 7\]; expected \[B, 2, N\]"):
        m(x[:, 0])
    with pytest.raises(ValueError, match=r"input_ids: got shape \[3, 2, 7\]; expected \[B, N\]"):
        make("metala")(x)


def test_the_losses_of_transformers():
    m, x = make("gla"), tokens(4, 6)
    y = torch.tensor([0, 2, 1, 1])
    out = m(x, labels=y)
    close(out.loss, torch.nn.functional.cross_entropy(out.logits, y))
    torch.manual_seed(0)
    m = LinattnForSequenceClassification(config("gla", num_labels=1))
    out = m(x, labels=y.float())
    close(out.loss, (out.logits[:, 0] - y).square().mean())


@pytest.mark.parametrize("kind", MIXERS)
def test_images_as_pixels_as_patches_and_as_grey_levels(kind):
    sizes = {"image_size": 8, "num_labels": 3, "bidirectional": True}
    y = torch.tensor([0, 2])
    for changes, pixels in (
        ({}, torch.rand(2, 1, 8, 8)),
        ({"patch_size": 4, "num_channels": 3}, torch.rand(2, 3, 8, 8)),
        (
            {"pixel_embedding": "table", "vocab_size": 256, "learned_positions": True},
            torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8),
        ),
    ):
        m = LinattnForImageClassification(config(kind, **sizes, **changes))
        out = m(pixels, labels=y)
        out.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())
        close(out.loss, torch.nn.functional.cross_entropy(out.logits, y))
        turned = m(pixels.transpose(2, 3)).logits
        assert not torch.allclose(out.logits, turned, atol=1e-6)


def test_patches_are_read_row_by_row():
    m = LinattnForImageClassification(config("gla", image_size=4, patch_size=2, num_labels=2))
    seen = []
    m.model.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    image = torch.rand(1, 1, 4, 4)
    m(image)
    weight, bias = m.patches.weight.flatten(1), m.patches.bias
    for i, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        patch = image[0, 0, row : row + 2, column : column + 2].flatten()
        close(seen[0][0, i], weight @ patch + bias)


def test_classifiers_are_saved_and_loaded(tmp_path):
    m = make("metala", two_towers=True)
    m.save_pretrained(tmp_path / "pairs")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pairs")
    x = tokens(2, 2, 5)
    assert torch.equal(loaded(x).logits, m(x).logits)
    m = LinattnForImageClassification(config("metala", image_size=4, num_labels=2)).eval()
    m.save_pretrained(tmp_path / "images")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "images")
    image = torch.rand(2, 1, 4, 4)
    assert torch.equal(loaded(image).logits, m(image).logits)


BAD = {
    "cls": (lambda: make("gla", pooling="cls"), "pooling: got 'cls' without bidirectional=True"),
    "patch": (
        lambda: LinattnForImageClassification(config("gla", image_size=8, patch_size=3)),
        "patch_size: got 3; expected a divisor of image_size = 8",
    ),
    "table": (
        lambda: LinattnForImageClassification(config("gla", pixel_embedding="table")),
        "pixel_embedding: got 'table' with patches of 1, 1 channels, 50 tokens",
    ),
    "pixels": (
        lambda: LinattnForImageClassification(config("gla", image_size=8))(torch.rand(2, 8, 8)),
        r"pixel_values: got shape \[2, 8, 8\]; expected \[B, 1, 8, 8\]",
    ),
    "levels": (
        lambda: LinattnForImageClassification(
            config("gla", image_size=8, pixel_embedding="table", vocab_size=256)
        )(torch.rand(2, 1, 8, 8)),
        r"pixel_values: got torch.float32; expected integers 0 to 255",
    ),
    "cache": (
        lambda: make("gla", bidirectional=True)(tokens(1, 3), cache=object()),
        "cache: got a cache in a bidirectional model",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
