"""Trials and sweeps: tiny ones, cut and gone on with, in one process and in two."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from linattn.cli import app
from linattn.cli.evaluate import TRAINED
from linattn.evaluate import presets, sweep, trial
from linattn.evaluate.settings import Settings
from linattn.evaluate.sweep import Sweep
from linattn.evaluate.tasks import TASKS
from linattn.tasks.long_range_arena import SETTINGS

pytest.importorskip("accelerate")
runner = CliRunner()
SMALL = Settings(
    "induction-heads", ("gla",), ({"length": 16},), ({"length": 16}, {"length": 32}),
    {"hidden_size": 16, "dropout": 0.1}, examples=64, test_examples=16, steps=6, rows=8,
    evaluate_every=2, warm_up=2, stop_at=1.0,
)  # fmt: skip


def tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def test_a_trial_writes_what_it_came_to_and_is_not_repeated(tmp_path):
    steps = []
    found = trial.run(SMALL, tmp_path / "a", lambda *told: steps.append(told[0]))
    assert steps == [1, 2, 3, 4, 5, 6]
    assert found["steps"] == 6
    assert [t["data"] for t in found["tests"]] == [{"length": 16}, {"length": 32}]
    assert all(0 <= t["accuracy"] <= 1 for t in found["tests"])
    assert found["state_bytes"] == 2 * 4 * 8 * 16
    assert not (tmp_path / "a" / "checkpoints").exists()
    assert trial.run(SMALL, tmp_path / "a") == json.loads(json.dumps(found))
    assert len(steps) == 6


@pytest.mark.parametrize("damage", [False, True])
def test_a_trial_that_was_cut_goes_on_to_the_same_weights(tmp_path, damage):
    """Also where the kill came while a checkpoint was written."""
    trial.run(SMALL, tmp_path / "whole")

    class CutError(Exception):
        pass

    def cut(step, loss, accuracy):
        if step == 5:
            raise CutError

    with pytest.raises(CutError):
        trial.run(SMALL, tmp_path / "cut", cut)
    kept = sorted(p.name for p in (tmp_path / "cut" / "checkpoints").iterdir())
    assert "checkpoint-4" in kept
    if damage:
        (tmp_path / "cut" / "checkpoints" / "checkpoint-4" / "trainer_state.json").write_text("{")
    steps = []
    trial.run(SMALL, tmp_path / "cut", lambda *told: steps.append(told[0]))
    assert steps == ([3, 4, 5, 6] if damage else [5, 6])
    for name, x in tensors(tmp_path / "whole").items():
        assert torch.equal(x, tensors(tmp_path / "cut")[name]), name


def test_a_trial_that_was_cut_after_it_had_learned_does_not_train_on(tmp_path, monkeypatch):
    settings = replace(SMALL, stop_at=0.01, steps=40, evaluate_every=2, test_examples=200)
    whole = trial.run(settings, tmp_path / "whole")

    def cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trial, "state_bytes", cut)
        with pytest.raises(KeyboardInterrupt):
            trial.run(settings, tmp_path / "cut")
    again = trial.run(settings, tmp_path / "cut")
    assert whole["steps"] == again["steps"] < 40
    assert whole["tests"] == again["tests"]
    assert again["validation"] == whole["validation"]
    assert again["seconds"] > 0


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
def test_a_damaged_result_is_named(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(ValueError, match=r"result: got .*result\.json, which is damaged"):
        trial.run(SMALL, tmp_path)


def test_a_trial_learns(tmp_path):
    """Something easy: to say the token after the only one that stands in front of it."""
    settings = replace(
        SMALL, task="mqar", train=({"length": 16, "pairs": 1, "vocabulary": 20,
        "random_filler": False},), test=(), model={"hidden_size": 32, "intermediate_size": 0,
        "initializer_range": 0.1}, mixer=("metala",), examples=2000, test_examples=100, steps=400,
        rows=32, learning_rate=1e-2, evaluate_every=50, stop_at=0.97,
    )  # fmt: skip
    found = trial.run(settings, tmp_path)
    assert found["tests"][0]["accuracy"] > 0.9
    assert found["steps"] < 400
    assert found["validation"] > 0.97


def test_a_diverging_trial_ends_with_a_result(tmp_path):
    found = trial.run(replace(SMALL, learning_rate=1e30, clip=0.0, steps=60, warm_up=0), tmp_path)
    json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert found["diverged"]
    assert found["steps"] < 60


def test_the_sweep_has_softmax_beside_and_options_of_variants():
    planned = Sweep(SMALL, ("convolution+metala:key=true", "gla"), (16, 32), (1e-3, 1e-2), 2,
                    {"learned_positions": True})  # fmt: skip
    trials = planned.trials()
    assert len(trials) == 3 * 2 * 2 * 2
    assert {text for text, _ in trials} == {"convolution+metala:key=true", "gla", "softmax"}
    for text, settings in trials:
        config = settings.configuration()
        assert config.learned_positions == (text == "softmax")
        assert (config.mixer_options == {"metala": {"key": True}}) == ("metala" in text)
    assert len({settings.name() for _, settings in trials}) == len(trials)
    alone = Sweep(SMALL, ("softmax:dropout=0.1",)).trials()
    assert [text for text, _ in alone] == ["softmax:dropout=0.1"]


def test_what_is_said_twice_runs_once():
    planned = Sweep(SMALL, ("gla:gate_rank=4,key_dim=8", "gla:key_dim=8,gate_rank=4", "gla"),
                    (16, 16), (1e-3, 1e-3))  # fmt: skip
    assert [text for text, _ in planned.trials()] == ["gla:gate_rank=4,key_dim=8", "gla", "softmax"]


def test_test_sets_are_told_apart_by_any_option():
    def of(*sets):
        return sweep.labels([{"tests": [{"data": options} for options in sets]}])

    assert of({"length": 16}, {"length": 32}) == ["length 16", "length 32"]
    assert of({"length": 16}, {"pairs": 2}) == ["length 16", "pairs 2"]
    assert of({"length": 16}, {"length": 16, "pairs": 2}) == ["as by default", "pairs 2"]
    assert of({}, {"pairs": 2}) == ["as by default", "pairs 2"]
    assert of({"length": 16}) == [""]


def row(mixer, rate, seed, validation, accuracy):
    return {
        "mixer": mixer, "settings": {"model": {"hidden_size": 16}, "learning_rate": rate,
        "task": "mqar"}, "validation": validation, "parameters": 5, "state_bytes": 7, "steps": 3,
        "seconds": 1.0, "tests": [{"data": {}, "accuracy": accuracy, "loss": 1.0}],
    }  # fmt: skip


def test_the_rate_of_the_best_mean_validation_score_counts():
    results = [row("gla", 0.1, 0, 0.9, 0.2), row("gla", 0.1, 1, 0.1, 0.2),
               row("gla", 0.2, 0, 0.6, 0.5), row("gla", 0.2, 1, 0.6, 0.7)]  # fmt: skip
    results[2]["diverged"] = True
    (found,) = sweep.summarise(results)
    assert sweep.cells(found)[0] == "gla (1 diverged)"
    assert (found["learning_rate"], found["seeds"]) == (0.2, 2)
    assert found["tests"][0]["accuracy"] == pytest.approx(0.6)
    assert found["tests"][0]["accuracy_deviation"] == pytest.approx(0.02**0.5 / 2**0.5 * 2**0.5)


def test_two_jobs_come_to_what_one_does(tmp_path):
    planned = Sweep(replace(SMALL, steps=2), ("gla",))
    one = {r["mixer"]: r["tests"] for r in sweep.run(planned, tmp_path / "one")}
    two = {r["mixer"]: r["tests"] for r in sweep.run(planned, tmp_path / "two", jobs=2)}
    assert one.keys() == two.keys() == {"gla", "softmax"}
    for name in one:
        for a, b in zip(one[name], two[name], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_the_command_writes_tables_and_goes_on(tmp_path):
    words = ["eval", "induction-heads", "--mixer", "gla", "--data", "length=16", "--examples", "64",
             "--test-examples", "8", "--steps", "2", "--rows", "8", "--set", "hidden_size=16",
             "--output", str(tmp_path)]  # fmt: skip
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert [r["mixer"] for r in found["rows"]] == ["gla", "softmax"]
    assert "| gla |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/result.json")}
    for path in tmp_path.glob("softmax*"):
        shutil.rmtree(path)
    assert runner.invoke(app, [*words, "--mixer", "gla:gate_rank=4"]).exit_code == 0
    kept = [p for p in times if p.parent.name.startswith("gla")]
    assert kept
    assert all(p.stat().st_mtime_ns == times[p] for p in kept)
    assert len(list(tmp_path.glob("*/result.json"))) == 3
    page = runner.invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "page.md")])
    assert page.exit_code == 0, page.output
    text = (tmp_path / "page.md").read_text()
    assert text.count("## Mixers on: induction-heads") == 1
    assert "## A trial" not in text  # told by the sweep


BAD = {
    "setting": (["--setting", "none"], "setting: got 'none'"),
    "mixer": (["--mixer", "gla2"], "mixer: got 'gla2'"),
    "form": (["--mixer", "gla:key"], "mixer: got 'gla:key'"),
    "option": (["--mixer", "gla:keys=1"], "mixer_options: got 'keys'"),
    "data": (["--data", "size=3"], "train: got 'size'"),
    "data form": (["--data", "length"], "train: got 'length'; expected NAME=VALUE"),
    "test": (["--test", "long=3"], "test: got 'long'"),
    "vocabulary": (["--set", "vocab_size=3"], "model: got 'vocab_size'"),
    "classes": (["--set", "num_labels=2"], "model: got 'num_labels'"),
    "options": (["--set", "mixer_options=3"], "mixer_options: got 3"),
    "path": (["--path", "/tmp"], "path: got /tmp; expected none"),
    "steps": (["--steps", "0"], "steps: got 0"),
    "rows": (["--rows", "100000"], "rows: got 100000"),
    "schedule": (["--schedule", "step"], "schedule: got 'step'"),
    "seeds": (["--seeds", "0"], "seeds: got 0"),
    "jobs": (["--jobs", "0"], "jobs: got 0"),
    "length": (["--data", "length=2"], "length: got 2"),
    "test length": (["--test", "length=2"], "length: got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_named(name, tmp_path):
    flags, message = BAD[name]
    words = ["eval", "induction-heads", "--steps", "2", "--examples", "64", "--output"]
    result = runner.invoke(app, [*words, str(tmp_path), *flags])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split()), result.output


def test_a_task_that_reads_files_wants_a_folder(tmp_path):
    result = runner.invoke(app, ["eval", "imdb", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "path: got None" in result.output


def test_the_command_knows_every_task():
    assert set(TRAINED) == set(TASKS)


def test_every_preset_is_whole():
    """Names of tasks and options, published sizes, two settings that are never mixed."""
    for name, chosen in presets.PRESETS.items():
        task, _ = name.split("/")
        given = {k: v for k, v in chosen.items() if k != "softmax"}
        path = {"path": "."} if TASKS[task].from_path else {}
        config = Settings(task, **given, **path).configuration()
        assert config.hidden_size % config.num_attention_heads == 0, name
    arena = {name for name in presets.PRESETS if name.split("/")[1] in SETTINGS}
    assert {"listops/nystromformer", "listops/s4", "path-x/s4", "aan/nystromformer"} <= arena
    small = Settings("listops", **presets.preset("listops", "nystromformer")).configuration()
    assert (small.num_hidden_layers, small.hidden_size, small.intermediate_size) == (2, 64, 128)
    assert (small.num_attention_heads, small.learned_positions) == (2, True)
    zoology = presets.preset("mqar", "zoology-512")
    assert (zoology["steps"], zoology["rows"]) == (64 * 100_000 // 128, 128)
    for name in presets.RATES:
        assert name in presets.PRESETS
