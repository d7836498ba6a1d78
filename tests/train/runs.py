"""Small runs of training, and what their logs say."""

import io
from dataclasses import replace

from rich.console import Console

from linattn.train import Settings
from linattn.train.record import read_log

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.1}


def settings(text, **changes):
    base = Settings(
        str(text), changes=SIZES, steps=12, rows=2, length=32, warm_up=3, evaluate_every=4,
        checkpoint_every=5, held_out_rows=4,
    )  # fmt: skip
    return replace(base, **changes)


def quiet():
    return Console(file=io.StringIO())


def log_of(folder):
    """The rows but for the time they took, as text: a step that a scaler skipped has norm nan."""
    rows = read_log(folder / "log.csv")
    return [{k: str(v) for k, v in row.items() if k != "seconds"} for row in rows]
