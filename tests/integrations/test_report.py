"""`linattn accelerate-report`: of a folder and of a built-in model."""

import pytest
import torch
from tiny_families import tiny
from typer.testing import CliRunner

from linattn.cli import app
from linattn.integrations import calls, report

SMALL = ["--tokens", "20", "--decoded", "2", "--repeats", "1"]


def test_a_folder(tmp_path):
    model = tiny("mamba2")
    model.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["accelerate-report", str(tmp_path), *SMALL])
    assert done.exit_code == 0, done.output
    for word in ("prefill", "decode", "training", "largest difference of a logit"):
        assert word in done.output
    rows, difference = report.measure(model, tokens=20, decoded=2, repeats=1, training=False)
    assert [row.work for row in rows] == ["prefill", "decode"]
    assert all(row.before > 0 and row.after > 0 for row in rows)
    assert 0 < difference < 1e-4
    assert not calls.active()


@pytest.mark.parametrize("name", report.BUILT_IN)
def test_a_built_in_model_has_about_100_million_parameters(name):
    with torch.device("meta"):
        model = report.load(name, torch.float32)
    assert 0.8e8 <= sum(p.numel() for p in model.parameters()) <= 1.4e8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-100m"], "model: got 'nothing-100m'"),
        (["mamba-100m", "--dtype", "float8"], "dtype: got 'float8'"),
        (["mamba-100m", "--tokens", "0"], "tokens: got 0"),
    ],
)
def test_errors(arguments, message):
    done = CliRunner().invoke(app, ["accelerate-report", *arguments])
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
