"""The demo: trains, samples, and says truthfully whether it learned more than bigrams."""

import io
import json
import math

import pytest
from rich.console import Console

from linattn import demo
from linattn.train import Settings, loop

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(loop, "matmul_rate", lambda dtype, device: 1e11)
    monkeypatch.setattr(demo, "seconds_per_step", lambda settings: 0.1)


@pytest.fixture
def text(tmp_path):
    """A byte does not tell the next, but what came before does."""
    path = tmp_path / "text.txt"
    path.write_text(("ab" * 40 + "ac" * 40) * 60)
    return path


def run(text, output, minutes=0.1, **changes):
    settings = Settings(
        str(text), changes=SIZES, rows=2, length=128, warm_up=5, learning_rate=0.01,
        held_out_rows=4, checkpoint_every=1000,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    options = {"output": output, "console": console, "settings": settings, "sample_tokens": 30}
    below = demo.run(minutes, **{**options, **changes})
    return below, console.file.getvalue()


def test_a_demo_writes_its_files_and_learns_more_than_bigrams(text, tmp_path):
    output = tmp_path / "demo"
    below, printed = run(text, output)
    found = json.loads((output / "demo.json").read_text())
    assert found["step"] == 200  # 60 would fit in the time
    assert found["bigram_bits_per_byte"] == pytest.approx(0.5, abs=0.03)  # a: b or c
    assert found["held_out_bits_per_byte"] < 0.3
    assert found["below"] is below is True
    assert found["settings"]["mixer"] == ["metala"]
    assert "is below the byte-bigram entropy" in printed
    assert len(found["sample"]) == len("def ") + 30
    assert (output / "train" / "loss.png").exists()
    steps = found["step"]
    run(text, output)  # again, in place of the first
    assert json.loads((output / "demo.json").read_text())["step"] == steps


def test_an_untrained_model_does_not_pass(text, tmp_path):
    settings = Settings(str(text), changes=SIZES, rows=2, length=128, learning_rate=0.0)
    below, printed = run(text, tmp_path / "demo", settings=settings)
    assert below is False
    assert "NOT below" in printed


def test_more_time_is_more_steps(text, tmp_path, monkeypatch):
    asked = []

    def count(settings, folder, console):
        asked.append(settings.steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", count)
    for minutes in (0.1, 1.0, 2.0):
        with pytest.raises(KeyboardInterrupt):
            run(text, tmp_path / "demo", minutes)
    assert asked == [200, 600, 1200]


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.inf])
def test_what_a_demo_refuses(text, tmp_path, minutes):
    with pytest.raises(ValueError, match=f"minutes: got {minutes}"):
        run(text, tmp_path / "demo", minutes)
    assert not (tmp_path / "demo").exists()
