"""Runs that were cut go on as if they had not been cut, and keep what is whole."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from runs import log_of, quiet, settings
from safetensors.torch import load_file

from linattn.train import Run, checkpoints, train
from linattn.train.record import read_log


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}, {"precision": "float16"},
                                     {"accumulation": 2, "mixer": ("gla", "softmax")}])  # fmt: skip
def test_a_run_that_was_cut_goes_on_with_the_same_batches_and_losses(text, tmp_path, changes):
    """Cut in the middle of step 8, after the checkpoint of step 5; dropout and all."""
    whole = train(settings(text, **changes), tmp_path / "whole", console=quiet())

    class CutError(Exception):
        pass

    step = Run.train_step

    def cut(run):
        if run.step == 8:
            raise CutError
        return step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "train_step", cut)
        with pytest.raises(CutError):
            train(settings(text, **changes), tmp_path / "cut", console=quiet())
    assert len(log_of(tmp_path / "cut")) == 8
    again = train(settings(text, **changes), tmp_path / "cut", resume=True, console=quiet())
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_kill_9_loses_no_more_than_the_steps_since_the_checkpoint(text, tmp_path):
    command = [
        sys.executable, "-m", "linattn", "train", str(text), "--steps", "400", "--rows", "2",
        "--length", "32", "--checkpoint-every", "3", "--held-out-rows", "2", "--sample", "0",
        "--warm-up", "1000",
        "--set", "hidden_size=32", "--set", "num_hidden_layers=1", "--output",
    ]  # fmt: skip
    process = subprocess.Popen([*command, str(tmp_path / "cut")], stdout=subprocess.DEVNULL)
    stop = time.monotonic() + 120
    while time.monotonic() < stop:
        newest = checkpoints.latest(tmp_path / "cut")
        if newest is not None and int(newest.name[-8:]) >= 6:
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    newest = checkpoints.latest(tmp_path / "cut")
    step = int(newest.name[-8:])
    assert step % 3 == 0
    assert len(read_log(tmp_path / "cut" / "log.csv")) - step <= 3
    steps = str(step + 3)
    for where, extra in (("cut", ["--resume"]), ("whole", [])):
        shorter = ["--steps", steps, *extra]
        # Still warming up: the learning rate does not depend on the number of steps.
        subprocess.run(
            [*command, str(tmp_path / where), *shorter], check=True, stdout=subprocess.DEVNULL
        )
    assert [r["step"] for r in read_log(tmp_path / "cut" / "log.csv")] == list(range(step + 3))
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_a_step_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(text, tmp_path):
    step = Run.train_step

    def spoiled(run):
        if run.step == 7:
            with torch.no_grad():
                run.model.lm_head.weight.fill_(math.nan)
        return step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "train_step", spoiled)
        with pytest.raises(ArithmeticError, match="loss nan and gradient norm nan at step 7"):
            train(settings(text), tmp_path / "run", console=quiet())
    kept = checkpoints.latest(tmp_path / "run")
    assert kept.name == "checkpoint-00000005"
    assert all(x.isfinite().all() for x in load_file(kept / "model.safetensors").values())
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (found["step"], found["finished"]) == (7, False)


@pytest.mark.parametrize("part", ["save_file", "fsync"])
def test_a_full_disk_keeps_the_last_good_checkpoint(text, tmp_path, part):
    calls = []

    def full(*args, **kwargs):
        calls.append(args)
        if len(calls) > (1 if part == "save_file" else 9):
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        owner = checkpoints if part == "save_file" else os
        real = getattr(owner, part)
        patch.setattr(owner, part, full)
        with pytest.raises(OSError, match=r"checkpoint-00000010 could not be written \(.*No space"):
            train(settings(text), tmp_path / "run", console=quiet())
    assert [p.name for p in checkpoints.found(tmp_path / "run")] == ["checkpoint-00000005"]
    assert not list((tmp_path / "run").glob("*.tmp"))
    train(settings(text), tmp_path / "run", resume=True, console=quiet())
    assert len(log_of(tmp_path / "run")) == 12


def test_what_a_kill_leaves_behind_is_no_checkpoint(text, tmp_path):
    folder = tmp_path / "run"
    train(settings(text, steps=5), folder, console=quiet())
    half = folder / "checkpoint-00000009.tmp"
    half.mkdir()
    (half / "progress.json").write_text("{}")
    (folder / "checkpoint-00000008").mkdir()
    with (folder / "log.csv").open("a") as file:
        file.write("5,1.0,2.0")  # a row cut short
    assert checkpoints.latest(folder).name == "checkpoint-00000005"
    train(settings(text), folder, resume=True, console=quiet())
    assert [row["step"] for row in read_log(folder / "log.csv")] == list(range(12))


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(text, tmp_path):
    step = Run.train_step

    def pressed(run):
        if run.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(run)

    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "train_step", pressed)
        with pytest.raises(KeyboardInterrupt):
            train(settings(text), tmp_path / "cut", console=quiet())
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoints.latest(tmp_path / "cut").name == "checkpoint-00000007"
    train(settings(text), tmp_path / "cut", resume=True, console=quiet())
    train(settings(text), tmp_path / "whole", console=quiet())
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_which_folders_a_run_takes(text, tmp_path):
    s, folder = settings(text, steps=5), tmp_path / "run"
    with pytest.raises(ValueError, match="without a checkpoint; expected the folder of a run"):
        train(s, folder, resume=True, console=quiet())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="a file; expected a folder"):
        train(s, tmp_path / "file", console=quiet())
    train(s, folder, console=quiet())
    with pytest.raises(ValueError, match="which holds a run; expected another folder, or --resume"):
        train(s, folder, console=quiet())
    with pytest.raises(ValueError, match=r"settings: got rows = 3, not 2; expected those of"):
        train(replace(s, rows=3), folder, resume=True, console=quiet())
    assert len(log_of(folder)) == 5


DAMAGE = {
    "model.safetensors": (b"", "model.safetensors"),
    "optimizer.safetensors": (b"\x10\x00", "optimizer.safetensors"),
    "progress.json": (b"{}", "progress.json, which is damaged"),
    "../log.csv": (b"\xff\xfe,", "log.csv"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_of_a_run_are_named(text, tmp_path, name):
    train(settings(text, steps=5), tmp_path / "run", console=quiet())
    content, message = DAMAGE[name]
    (tmp_path / "run" / "checkpoint-00000005" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        train(settings(text, steps=8), tmp_path / "run", resume=True, console=quiet())


def test_a_text_that_has_changed_is_refused(text, tmp_path):
    train(settings(text, steps=5), tmp_path / "run", console=quiet())
    text.write_text(text.read_text() + "more of it, and of other things.\n" * 40)
    with pytest.raises(ValueError, match="data: got a text that has changed"):
        train(settings(text, steps=8), tmp_path / "run", resume=True, console=quiet())


def test_other_folders_are_no_checkpoints_and_stay(text, tmp_path):
    train(settings(text, steps=5), tmp_path / "run", console=quiet())
    mine = tmp_path / "run" / "checkpoint-best"
    shutil.copytree(tmp_path / "run" / "checkpoint-00000005", mine)
    train(settings(text, steps=10), tmp_path / "run", resume=True, console=quiet())
    assert mine.is_dir()
    assert checkpoints.latest(tmp_path / "run").name == "checkpoint-00000010"


def test_a_run_that_was_cut_before_its_first_checkpoint_begins_anew(text, tmp_path):
    (tmp_path / "run").mkdir()
    train(settings(text), tmp_path / "whole", console=quiet())
    lines = (tmp_path / "whole" / "log.csv").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "log.csv").write_text("".join(lines[:4]))
    train(settings(text), tmp_path / "run", console=quiet())
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_a_log_that_was_lost_leaves_the_step_right(text, tmp_path):
    train(settings(text, steps=5), tmp_path / "run", console=quiet())
    (tmp_path / "run" / "log.csv").unlink()
    train(settings(text, steps=8), tmp_path / "run", resume=True, console=quiet())
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (found["step"], found["finished"]) == (8, True)
