"""`linattn train`, `generate` and `info --memory` as commands, and what is behind them."""

import csv
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from linattn.cli import app
from linattn.generate import cache_bytes, generate, latency, load, printable, untrained
from linattn.models import LinattnForCausalLM
from linattn.models.presets import preset
from linattn.models.tokenizers import byte_tokenizer
from linattn.train import loop

runner = CliRunner()


@pytest.fixture(autouse=True)
def _rate(monkeypatch):
    monkeypatch.setattr(loop, "matmul_rate", lambda dtype, device: 1e11)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("import os\nprint(os.name)\n" * 200)
    return path


def invoke(*words):
    return runner.invoke(app, [str(word) for word in words])


SMALL = ("--rows", 2, "--length", 32, "--held-out-rows", 2, "--set", "hidden_size=32", "--set",
         "num_hidden_layers=2", "--steps", 6, "--checkpoint-every", 3)  # fmt: skip


def test_train_then_resume_then_generate(text, tmp_path):
    folder = tmp_path / "run"
    result = invoke("train", text, *SMALL, "--output", folder, "--sample", 20, "--mixer", "gla")
    assert result.exit_code == 0, result.output
    assert "held out bits per byte" in result.output
    assert len((folder / "sample.txt").read_text()) >= 32
    assert json.loads((folder / "run.json").read_text())["settings"]["mixer"] == ["gla"]
    again = invoke("train", text, *SMALL, "--output", folder, "--mixer", "gla")
    assert again.exit_code == 2
    assert "which holds a run" in " ".join(again.output.split())
    more = ("--steps", 8, "--resume", "--sample", 0, "--mixer", "gla")
    again = invoke("train", text, *SMALL, "--output", folder, *more)
    assert again.exit_code == 0, again.output
    assert json.loads((folder / "run.json").read_text())["step"] == 8
    made = invoke("generate", folder, "--prompt", "import ", "--tokens", 12, "--temperature", 0)
    assert made.exit_code == 0, made.output
    assert "12 tokens" in made.output


DAMAGE = {
    "cut weights": ("model.safetensors", lambda b: b[:-100], "model: got .*whole"),
    "no weights": ("model.safetensors", lambda b: b"", "model: got .*whole"),
    "no configuration": ("config.json", lambda b: b"{}", "model: got .*config.json"),
    "garbage": ("config.json", lambda b: b"\xff{", "model: got .*config.json"),
    "other mixer": ("config.json", lambda b: b.replace(b'"gla"', b'"hgrn2"'), "model: got"),
    "more layers": (
        "config.json",
        lambda b: re.sub(rb'"num_hidden_layers": 2', b'"num_hidden_layers": 3', b),
        "model: got",
    ),
    "another family": ("config.json", lambda b: b.replace(b'"linattn"', b'"gpt2"'), "a 'gpt2'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_folder_is_named(tmp_path, name):
    config = preset("bytes-800k", "gla", hidden_size=32, num_hidden_layers=2)
    LinattnForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    load(tmp_path)
    file, damage, message = DAMAGE[name]
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_options_that_no_run_can_have_are_named(text, tmp_path):
    for flags, words in (
        (("--set", "vocab_size=10"), "changes: got 'vocab_size'"),
        (("--set", "mixer=gla"), "changes: got 'mixer'"),
        (("--set", "dropout=x"), "dropout: got"),
        (("--set", "rms_norm_eps=abc"), "rms_norm_eps: got"),
        (("--seed", 2**60), "seed: got"),
    ):
        result = invoke("train", text, *SMALL, "--output", tmp_path / "run", *flags)
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.output.split()), result.output
    for options in ({"temperature": 1e-320}, {"seed": 10**23}, {"prompt": "a\udcff"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: got"):
            generate(
                untrained("bytes-800k", "gla"), None, **{"prompt": "a", "tokens": 2, **options}
            )


def test_generate_says_that_first_weights_make_noise():
    made = invoke("generate", "--tokens", 5, "--mixer", "softmax")
    assert made.exit_code == 0, made.output
    assert "noise" in made.output


def test_the_latency_of_a_token_is_written_and_drawn(tmp_path):
    folder = tmp_path / "[b]latency"  # no markup
    flags = ("--mixer", "metala", "--mixer", "softmax", "--longest", 300, "--latency", folder)
    result = invoke("generate", *flags)
    assert result.exit_code == 0, result.output
    assert {"[tokens]", "[ms]", "[b]latency"} <= set(
        re.findall(r"\[\w+\](?:latency)?", result.output)
    )
    rows = list(csv.DictReader((folder / "latency.csv").open()))
    assert [row["tokens"] for row in rows] == ["16", "64", "256", "300"] * 2
    sizes = {m: {r["bytes"] for r in rows if r["model"] == m} for m in ("metala", "softmax")}
    assert len(sizes["metala"]) == 1  # constant memory
    assert len(sizes["softmax"]) == 4
    assert (folder / "latency.png").stat().st_size > 1000


def test_info_tells_the_memory_of_a_training_step():
    result = invoke("info", "--memory", "metala-1.3b")
    assert result.exit_code == 0
    assert "1,336,418,304 parameters" in result.output
    assert "22.08" in result.output  # 12 K + 60 * 24 * 2048 * 2048 bytes
    assert invoke("info", "--memory", "gpt").exit_code == 2
    assert invoke("info", "--memory", "pythia-14m", "--length", 0).exit_code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "nowhere.txt"), "data: got nowhere.txt"),
        (("train", "--mixer", "rwkv"), "mixer: got 'rwkv'"),
        (("train", "--set", "hidden_size"), "set: got 'hidden_size'; expected NAME=VALUE"),
        (("train", "--set", "width=3"), "width: got an unknown option"),
        (("train", "--steps", "0"), "steps: got 0"),
        (("generate", "nowhere"), "model: got nowhere"),
        (("generate", "--tokens", "0"), "tokens: got 0"),
        (("generate", "--prompt", ""), "prompt: got no tokens"),
        (("generate", "--top-p", "0"), "top_p: got 0.0"),
        (("generate", "--temperature", "-1"), "temperature: got -1.0"),
        (("generate", "--latency", "{tmp}", "--longest", "0"), "longest: got 0"),
    ],
)
def test_bad_flags_are_named(words, expected, tmp_path):
    result = invoke(*(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code == 2, result.output
    joined = " ".join(result.output.replace("│", " ").split())
    assert expected in joined, joined


def test_greedy_text_is_that_of_whole_passes():
    torch.manual_seed(0)
    model = LinattnForCausalLM(preset("bytes-800k", initializer_range=0.2)).eval()
    made = generate(model, None, "def f", 20, temperature=0)
    x = torch.tensor([list(b"def f")])
    for _ in range(20):
        x = torch.cat([x, model(x, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert made.text == byte_tokenizer().decode(x[0, 5:].tolist())
    assert made.tokens == 20
    assert made.tokens_per_second > 0


def test_draws_follow_the_seed():
    model = untrained("bytes-800k", "gla")
    a, b, c = (generate(model, None, "x", 30, seed=seed).text for seed in (0, 0, 1))
    assert a == b != c


def test_a_terminal_gets_no_control_characters():
    assert printable("a\x1b[2Jb\n\té\x00\ufffd") == "a?[2Jb\n\té??"


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model: got .*; expected the folder of a saved model"):
        load(tmp_path)


def test_the_cache_of_a_linear_mixer_does_not_grow():
    rows = latency(untrained("bytes-800k", "metala"), [8, 64], repeats=2)
    assert rows[0]["bytes"] == rows[1]["bytes"]
    model = untrained("bytes-800k", "softmax")
    rows = latency(model, [8, 64], repeats=2)
    # 4 layers, keys and values of 128 channels in float32, two tokens timed.
    assert [r["bytes"] for r in rows] == [4 * 2 * 128 * 4 * (n + 2) for n in (8, 64)]
    assert cache_bytes(model(torch.zeros(1, 3, dtype=torch.long)).cache) == 4 * 2 * 128 * 4 * 3
