"""Scores, perplexity and recall, each against what it means written out."""

import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from typer.testing import CliRunner

from linattn.cli import app
from linattn.evaluate import recall
from linattn.evaluate.batches import Batches
from linattn.evaluate.models import load
from linattn.evaluate.perplexity import Perplexity, perplexity, windows
from linattn.evaluate.report import report
from linattn.evaluate.score import score, state_bytes
from linattn.models import LinattnConfig, LinattnForCausalLM, LinattnForSequenceClassification
from linattn.models.tokenizers import byte_tokenizer
from linattn.tasks.examples import UNSCORED, Classes, Examples
from linattn.tasks.language import Corpus

runner = CliRunner()


def tiny(mixer="gla", **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "initializer_range": 0.3}  # fmt: skip
    return LinattnForCausalLM(LinattnConfig(mixer=mixer, **{**sizes, **changes})).eval()


class Fixed(nn.Module):
    """A model that says at each position what it was told to."""

    def __init__(self, answers, vocabulary=9):
        super().__init__()
        self.answers, self.vocabulary, self.at = answers, vocabulary, 0

    def forward(self, input_ids):
        rows = self.answers[self.at : self.at + len(input_ids)]
        self.at += len(input_ids)
        logits = nn.functional.one_hot(rows, self.vocabulary).float() * math.log(2)
        return CausalLMOutputWithPast(logits=logits)


def test_score_of_examples():
    labels = torch.full((3, 4), UNSCORED)
    labels[0, 1], labels[0, 3], labels[1, 2], labels[2, 0] = 5, 6, 7, 8
    answers = torch.zeros(3, 4, dtype=torch.long)
    answers[0, 1], answers[0, 3], answers[1, 2] = 5, 1, 7
    found = score(Fixed(answers), Examples(torch.zeros_like(labels), labels), rows=2)
    assert found["accuracy"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found["all_right"] == pytest.approx(1 / 3)
    right, wrong = -math.log(2 / 10), -math.log(1 / 10)  # one logit of log 2, eight of 0
    assert found["loss"] == pytest.approx((2 * right + 2 * wrong) / 4)


def test_score_of_classes_leaves_padding_out():
    config = LinattnConfig(
        vocab_size=9, hidden_size=32, num_hidden_layers=1, num_labels=3, num_attention_heads=2,
        bidirectional=True, initializer_range=0.5,
    )  # fmt: skip
    m = LinattnForSequenceClassification(config).eval()
    x, lengths = torch.randint(9, (6, 12)), torch.tensor([3, 12, 5, 7, 1, 9])
    alone = torch.cat([m(x[i : i + 1, :n]).logits for i, n in enumerate(lengths)])
    labels = alone.argmax(-1)
    labels[4] = (labels[4] + 1) % 3
    x[torch.arange(12) >= lengths[:, None]] = 8
    assert score(m, Classes(x, labels, lengths), rows=4)["accuracy"] == pytest.approx(5 / 6)


def test_state_bytes_counts_every_layer():
    assert state_bytes(tiny("gla"), 100) == 2 * 4 * 2 * 8 * 16
    assert state_bytes(tiny("softmax"), 100) == 2 * 4 * 100 * 2 * 32
    assert state_bytes(tiny("softmax", bidirectional=False), 7) == 2 * 4 * 7 * 2 * 32


def test_batches_are_of_one_set_and_take_each_example_once_an_epoch():
    sets = [Examples(torch.arange(n)[:, None] + 100 * i, torch.zeros(n, 1)) for i, n in
            enumerate((8, 13))]  # fmt: skip
    batches = Batches(sets, 4, 20, seed=3)
    per_epoch = 2 + 3
    assert len(batches) == 20
    for epoch in range(4):
        seen = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            rows = batches[step]["input_ids"][:, 0].tolist()
            assert len({row // 100 for row in rows}) == 1
            seen += rows
        assert len(seen) == len(set(seen)) == 20
        assert sum(row < 100 for row in seen) == 8
    again = Batches(sets, 4, 20, seed=3)
    assert torch.equal(again[17]["input_ids"], batches[17]["input_ids"])  # whatever came before
    assert any(not torch.equal(Batches(sets, 4, 20, 4)[i]["input_ids"], batches[i]["input_ids"])
               for i in range(5))  # fmt: skip


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (50, 50), (2, 1), (2, 2)])
def test_perplexity_is_the_loss_of_every_token_in_its_window(context, stride):
    """By hand, a token at a time, documents apart."""
    m, documents = tiny(), [torch.randint(256, (n,)) for n in (31, 1, 9, 2)]
    starts = torch.tensor([0, 31, 32, 41])
    text = Corpus(torch.cat(documents).int(), starts, num_bytes=60)
    nats, tokens = 0.0, 0
    step = min(stride, context - 1)
    for document in documents:
        begin, scored = 0, 1
        while scored < len(document):
            end = min(begin + context, len(document))
            logs = m(document[None, begin:end]).logits[0].log_softmax(-1)
            for t in range(scored, end):
                nats -= logs[t - begin - 1, document[t]].item()
            tokens, scored, begin = tokens + end - scored, end, begin + step
    found = perplexity(m, text, context=context, stride=stride, rows=3)
    assert found.tokens == tokens == 30 + 8 + 1
    assert found.nats == pytest.approx(nats, rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(nats / tokens / math.log(2) / (60 / 43), rel=1e-4)


def test_windows_score_every_token_once():
    for length in range(2, 40):
        for context in range(2, 12):
            for stride in range(1, context):
                scored = [t for w in windows(5, 5 + length, context, stride)
                          for t in range(w.scored, w.last)]  # fmt: skip
                assert scored == list(range(6, 5 + length))
                assert all(w.last - w.first <= context and w.scored > w.first
                           for w in windows(5, 5 + length, context, stride))  # fmt: skip


def test_recall_agrees_with_greedy_generation(tmp_path):
    """Every token the likeliest: then greedy decoding says it; the model is made to know some."""
    m, tokenizer = tiny("softmax"), byte_tokenizer()
    m.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    m, tokenizer = load(tmp_path)
    assert isinstance(m, type(AutoModelForCausalLM.from_pretrained(tmp_path)))
    prompt = recall.make("short-passkey", 60, 0.5, 0)[0]
    text = torch.tensor([list(prompt.text.encode())])
    said = m.generate(text, max_new_tokens=3, do_sample=False, attention_mask=text * 0 + 1)
    words = bytes(said[0, -3:].tolist()).decode("latin-1")
    if words.isascii():
        right = prompt._replace(answer=words)
        assert recall._answer(m, tokenizer, right, "phonebook", 0) == (1.0, 1.0)
        assert recall._answer(m, tokenizer, right, "phonebook", 3) == (1.0, 1.0)
    wrong = prompt._replace(answer="~!~")
    assert recall._answer(m, tokenizer, wrong, "phonebook", 3) == (0.0, 0.0)


def test_recall_grid_counts_and_names_bad_input():
    m, tokenizer = tiny(), byte_tokenizer()
    cells = recall.grid(m, tokenizer, "needle-multivalue", [200], [0.0, 1.0], trials=2)
    assert [(c.length, c.depth, c.answers) for c in cells] == [(200, 0.0, 8), (200, 1.0, 8)]
    (cell,) = recall.grid(m, tokenizer, "phonebook", [5], [0.5], trials=3)
    assert (cell.depth, cell.answers) == (None, 3)
    values, lengths, depths = recall.table(cells)
    assert (values.shape, lengths, depths) == ((2, 1), [200], [0.0, 1.0])
    for changes, message in (
        ({"kind": "haystack"}, "kind: got 'haystack'"), ({"trials": 0}, "trials: got 0"),
        ({"depths": [1.5]}, "depth: got 1.5"), ({"generated": -1}, "generated: got -1"),
    ):  # fmt: skip
        given = {"kind": "passkey", "lengths": [100], "depths": [0.5], **changes}
        with pytest.raises(ValueError, match=message):
            recall.grid(m, tokenizer, **given)


def test_models_of_others_and_what_they_cannot(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    m, tokenizer = load(tmp_path)
    assert recall.grid(m, tokenizer, "short-passkey", [50], [0.5], trials=1)[0].answers == 1
    with pytest.raises(ValueError, match="length: got 300; expected at most 64 tokens"):
        recall.grid(m, tokenizer, "short-passkey", [300], [0.5], trials=1)
    text = Corpus(torch.randint(256, (200,)).int(), torch.tensor([0]), num_bytes=200)
    assert perplexity(m, text, context=64).tokens == 199
    with pytest.raises(ValueError, match="context: got 65; expected at most 64 tokens"):
        perplexity(m, text, context=65)
    assert Perplexity(1e6, 10, 1.0, 8, 8).perplexity == math.inf
    result = runner.invoke(app, ["eval", "map", str(tmp_path), "--output", str(tmp_path / "m")])
    assert result.exit_code == 2
    assert "model: got GPT2LMHeadModel" in " ".join(result.output.split())


@pytest.mark.parametrize("content", ['{"kind": "sweep"}', '{"kind": "recall", "cells": 3}', "{"])
def test_a_report_of_damaged_results_names_them(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"folder: got .*results\.json"):
        report([tmp_path], tmp_path / "page.md")
    (tmp_path / "results.json").unlink()
    with pytest.raises(ValueError, match="folder: got"):
        report([tmp_path], tmp_path / "page.md")
    with pytest.raises(ValueError, match=r"output: got .*a folder"):
        report([tmp_path], tmp_path)


def test_the_commands_on_a_saved_model(tmp_path):
    m = tiny("metala")
    m.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("import os\nprint(os.name)\n" * 40)

    def invoke(*words):
        result = runner.invoke(app, ["eval", *(str(word) for word in words)])
        assert result.exit_code == 0, result.output
        return result.output

    where = ("--output", tmp_path / "p")
    invoke(
        "perplexity", tmp_path / "model", "--data", tmp_path / "text.txt", "--context", 16, *where
    )
    found = json.loads((tmp_path / "p" / "perplexity.json").read_text())
    assert found["kind"] == "perplexity"
    assert found["rows"][0]["perplexity"] > 1
    invoke("recall", tmp_path / "model", "--length", 100, "--depth", 0.5, "--trials", 2,
           "--output", tmp_path / "r")  # fmt: skip
    assert json.loads((tmp_path / "r" / "recall.json").read_text())["cells"][0]["answers"] == 2
    invoke("map", tmp_path / "model", "--tokens", 16, "--output", tmp_path / "m")
    rows = json.loads((tmp_path / "m" / "concentration.json").read_text())["rows"]
    assert len(rows) == 2 * 2
    assert (tmp_path / "m" / "map.png").stat().st_size > 1000
    invoke("map", "--mixer", "gla", "--tokens", 16, "--no-picture", "--output", tmp_path / "n")
    assert not (tmp_path / "n" / "map.png").exists()
    result = runner.invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "all.md")])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "all.md").read_text()
    for heading in ("Perplexity", "Recall", "Attention maps"):
        assert f"## {heading}" in page
    assert "![map](m/map.png)" in page
