"""The demo and its model: decoding equals the full forward, files are whole, the verdict holds."""

import io
import json
import math
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError

from linattn import demo
from linattn.models.byte_language_model import ByteLanguageModel, Configuration, load, save

TINY = Configuration(layers=2, dim=32, heads=2, hidden=48)


@pytest.fixture
def folder(tmp_path):
    """A corpus where a byte does not tell the next, but what came before does, to a tiny model."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.py").write_text("ab" * 400 + "ac" * 400)
    return folder


def make(**options):
    torch.manual_seed(0)
    return ByteLanguageModel(replace(TINY, **options)).eval()


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """A clock that advances a second each time it is read: a training step reads it twice."""
    ticks = count()
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


def run(folder, output, steps=5, **options):
    options = {"minutes": steps / 30, "rows": 2, "length": 32, "sample_bytes": 20, **options}
    console = Console(file=io.StringIO(), width=100)
    below = demo.run(output=output, console=console, configuration=TINY, folder=folder, **options)
    return below, console.file.getvalue()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_greedy_decode_with_a_cache_equals_the_full_forward(backend):
    model = make(backend=backend)
    made = model.generate(b"import os", 30, temperature=0)
    text = list(b"import os")
    for byte in made:
        assert int(model(torch.tensor([text]))[0, -1].argmax()) == byte
        text.append(byte)


def test_logits_do_not_depend_on_where_the_text_is_cut():
    model = make()
    tokens = torch.randint(256, (2, 150))
    whole, end = model(tokens, return_cache=True)
    for cuts in ([1], [70], [149], [64, 65, 66, 130]):
        cache, parts = None, []
        for part in tokens.tensor_split(cuts, dim=1):
            logits, cache = model(part, cache=cache, return_cache=True)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
        for got, expected in zip(cache, end, strict=True):
            torch.testing.assert_close(got.state, expected.state, rtol=1e-4, atol=1e-5)


def test_a_cache_has_the_same_size_after_any_number_of_tokens():
    model = make()
    sizes = [
        [c.state.shape for c in model(torch.zeros(1, n, dtype=torch.long), return_cache=True)[1]]
        for n in (1, 10, 300)
    ]
    assert sizes[0] == sizes[1] == sizes[2] == [(1, 2, 16, 16)] * 2


def test_logits_do_not_see_later_bytes():
    model = make()
    tokens = torch.randint(256, (1, 100))
    other = tokens.clone()
    other[:, 60:] = (other[:, 60:] + 1) % 256
    assert torch.equal(model(tokens)[:, :60], model(other)[:, :60])
    assert not torch.equal(model(tokens)[:, 60:], model(other)[:, 60:])


def test_samples_follow_the_generator():
    model = make()
    a, b, c = (
        model.generate(b"x", 40, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert a == b
    assert a != c


def test_what_the_model_refuses():
    model = make()
    for call, message in (
        (lambda: model.generate(b"", 1), "prompt: got no bytes"),
        (lambda: model.generate(b"a", 0), "n: got 0; expected"),
        (lambda: model.generate(b"a", 1, temperature=-1.0), "temperature: got -1.0"),
        (lambda: model(torch.zeros(3, dtype=torch.long)), r"tokens: got shape \[3\]"),
        (lambda: model(torch.zeros(1, 3, dtype=torch.long), cache=[]), "cache: got 0 entries"),
        (lambda: Configuration(layers=0), "layers: got 0; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"tokens: got torch\.float32; expected torch\.int64"):
        model(torch.zeros(1, 3))


def test_a_saved_model_is_the_same_model(tmp_path):
    model = make(backend="reference")
    save(model, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    assert again.configuration == model.configuration
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, model.state_dict()[n]) for n, x in again.state_dict().items())


def test_a_write_that_fails_leaves_the_last_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save(make(), path)
    before = path.read_bytes()

    def fail(weights, beside, metadata):
        beside.write_bytes(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save(make(), path)
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"path: got .*without a configuration"):
        load(tmp_path / "other.safetensors")
    (tmp_path / "half.safetensors").write_bytes(b"half a file")
    with pytest.raises(SafetensorError):
        load(tmp_path / "half.safetensors")


def test_the_heads_begin_with_memories_from_a_few_bytes_to_thousands():
    for block in make(heads=4).blocks:
        g = torch.nn.functional.logsigmoid(block.attention.decay_proj.bias.detach()) / 16
        assert g.exp()[0] < 0.25
        assert g[-1] > -1e-3
        assert (g.diff() > 0).all()


def test_a_run_writes_whole_files_and_learns_more_than_bigrams(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "LEARNING_RATE", 0.01)  # there are few steps
    output = tmp_path / "run"
    below, printed = run(folder, output, steps=80, rows=4)
    names = {path.name for path in output.iterdir()}
    assert names == {"model.safetensors", "run.json", "loss.png"}  # nothing temporary is left
    found = json.loads((output / "run.json").read_text())
    assert found["steps"] == len(found["losses"]) == 200
    assert found["seed"] == 0
    assert found["configuration"]["dim"] == 32
    assert found["bigram_bits"] == pytest.approx(0.5, abs=0.02)  # a: b or c
    assert found["held_out_bits"] < 0.3
    assert found["below"] is below is True
    assert load(output / "model.safetensors").configuration == TINY
    assert "held-out loss is below the byte-bigram entropy" in printed


def test_an_untrained_model_does_not_pass(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "LEARNING_RATE", 0.0)
    below, printed = run(folder, tmp_path / "run")
    assert below is False
    assert "NOT below" in printed


def test_ctrl_c_in_training_keeps_what_was_learned(folder, tmp_path, monkeypatch):
    steps = []

    def rate(step, share):
        steps.append(step)
        if step == 3:
            raise KeyboardInterrupt
        return 1e-3

    monkeypatch.setattr(demo, "learning_rate", rate)
    _, printed = run(folder, tmp_path / "run", minutes=10)
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert steps == [0, 1, 2, 3]
    assert found["steps"] == 3
    assert found["interrupted"] is True
    assert found["held_out_bits"] > 0
    assert "interrupted" in printed


def test_ctrl_c_after_training_keeps_the_model(folder, tmp_path, monkeypatch):
    def stop(model, windows):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_score", stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["steps"] > 0
    assert found["held_out_bits"] is None
    assert load(tmp_path / "run" / "model.safetensors").configuration == TINY


def test_a_run_leaves_the_thread_count_alone(folder, tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(folder, tmp_path / "run", steps=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_sample_has_no_control_characters(folder, tmp_path):
    run(folder, tmp_path / "run", sample_bytes=200)  # hardly trained: writes every kind of byte
    sample = json.loads((tmp_path / "run" / "run.json").read_text())["sample"]
    assert sample.startswith("def ")
    assert len(sample) == 204
    assert all(c in "\n\t" or (c.isprintable() and c.isascii()) for c in sample)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    assert demo.learning_rate(0, 0.0) == pytest.approx(3e-3 / 20)
    assert demo.learning_rate(19, 0.0) == pytest.approx(3e-3)
    assert demo.learning_rate(99, 1.0) == demo.learning_rate(99, 7.0) == pytest.approx(3e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0.0}, "minutes: got 0.0; expected a number > 0"),
        ({"minutes": math.inf}, "minutes: got inf; expected a finite float"),
        ({"rows": 0}, "rows: got 0"),
        ({"length": 10_000}, "text: got .* bytes; expected at least"),
    ],
)
def test_what_a_run_refuses_leaves_no_folder(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(folder, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_an_output_that_is_a_file_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"output: got .*a file; expected a folder"):
        run(folder, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
