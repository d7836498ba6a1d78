"""The settings of the evaluations by name: as published, and what a CPU does in minutes."""

from __future__ import annotations

from typing import Any

from linattn._validation import reject
from linattn.tasks.long_range_arena import SETTINGS, Setting

# Zoology: layers without a feed-forward part; learned positions for softmax attention alone.
_MQAR = {"intermediate_size": 0, "dropout": 0.1}
_SOFTMAX = {"learned_positions": True, "mixer_options": {"softmax": {"rope": None}}}


def _zoology(length: int, pairs: int, rows: int) -> dict[str, Any]:
    """Return a column of Zoology's figure 2; the paper sweeps 64 to 512 channels, four rates."""
    steps = 64 * 100_000 // rows  # 64 epochs of 100,000 examples
    return {
        "train": ({"length": length, "pairs": pairs, "random_filler": False},),
        "model": {**_MQAR, "hidden_size": 64, "max_position_embeddings": length},
        "examples": 100_000, "test_examples": 3000, "steps": steps, "rows": rows,
        "evaluate_every": 100_000 // rows, "learning_rate": 1e-3, "warm_up": 0,
        "softmax": _SOFTMAX,
    }  # fmt: skip


def _pairs(*sizes: tuple[int, int]) -> tuple[dict[str, Any], ...]:
    return tuple({"length": length, "pairs": pairs, "random_filler": False}
                 for length, pairs in sizes)  # fmt: skip


_SMALL = {"length": 64, "vocabulary": 256, "random_filler": False}
# Rates to sweep where the paper does; --learning-rate in their place.
RATES: dict[str, tuple[float, ...]] = {
    "mqar/cpu": (3e-3, 1e-2),
    **{f"mqar/zoology-{n}": (1e-4, 4.6e-4, 2.2e-3, 1e-2) for n in (64, 128, 256, 512)},
    "mqar/based": (1e-3, 3.2e-3, 1e-2, 3.2e-2),
}


def _arena(setting: Setting, positions: int) -> dict[str, Any]:
    s = setting
    model = {
        "num_hidden_layers": s.layers, "hidden_size": s.dim, "intermediate_size": s.feed_forward,
        "num_attention_heads": s.heads, "dropout": s.dropout, "bidirectional": s.bidirectional,
        "learned_positions": s.learned_positions, "max_position_embeddings": positions,
    }  # fmt: skip
    return {
        "model": model, "learning_rate": s.learning_rate, "weight_decay": s.weight_decay,
        "schedule": s.schedule, "warm_up": s.warm_up, "steps": s.steps, "rows": s.rows,
        "evaluate_every": s.evaluate_every, "stop_at": 1.0,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "mqar/cpu": {
        "train": tuple({**_SMALL, "pairs": pairs} for pairs in (2, 4, 8)),
        "test": tuple({**_SMALL, "pairs": pairs} for pairs in (4, 8, 16)),
        "model": {**_MQAR, "hidden_size": 64, "dropout": 0.0, "initializer_range": 0.05,
                  "max_position_embeddings": 64},
        "examples": 10_000, "steps": 2000, "rows": 32, "evaluate_every": 200, "softmax": _SOFTMAX,
    },
    "mqar/zoology-64": _zoology(64, 4, 512),
    "mqar/zoology-128": _zoology(128, 8, 512),
    "mqar/zoology-256": _zoology(256, 16, 256),
    "mqar/zoology-512": _zoology(512, 64, 128),
    # Based (Arora et al. 2024), with 20,000 examples of each set, 32 epochs; its models have
    # --mixer convolution+NAME.
    "mqar/based": {
        "train": _pairs((64, 4), (128, 8), (256, 16), (256, 32), (256, 64)),
        "test": _pairs((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256),
                       (2048, 512)),
        "model": {**_MQAR, "hidden_size": 128, "num_attention_heads": 2,
                  "max_position_embeddings": 2048},
        "examples": 20_000, "test_examples": 1000, "steps": 32 * 5 * 20_000 // 256, "rows": 256,
        "evaluate_every": 390, "softmax": _SOFTMAX,
    },
    # What reviewers asked for: more pairs in 512 tokens.
    "mqar/hard": {**_zoology(512, 80, 128)},
    "copy/short-to-long": {
        "train": ({"shortest": 5, "longest": 20},),
        "test": tuple({"shortest": n, "longest": n} for n in (10, 20, 40, 80, 160)),
        "steps": 3000, "stop_at": 1.0,
    },
    "selective-copying/mad": {"train": ({"length": 256, "data": 16, "vocabulary": 16},)},
    "selective-copying/mamba": {
        "train": ({"length": 4096, "data": 16, "vocabulary": 16},), "steps": 400_000, "rows": 64,
        "learning_rate": 1e-4, "weight_decay": 0.0, "evaluate_every": 5000,
    },
    "induction-heads/short-to-long": {
        "train": ({"length": 64},),
        "test": tuple({"length": 2**i} for i in range(6, 13)),
    },
    "induction-heads/mamba": {
        "train": ({"length": 256},), "test": tuple({"length": 2**i} for i in range(6, 21)),
        "examples": 65_536, "test_examples": 64, "steps": 25 * 8192, "rows": 8,
        "learning_rate": 1e-3, "weight_decay": 0.0, "evaluate_every": 8192,
    },
    # Short texts first: at 256 bytes alone nothing was learned in 1000 steps.
    "passkey/cpu": {
        "train": tuple({"length": n} for n in (24, 32, 64, 128)),
        "model": {"hidden_size": 64, "num_attention_heads": 2, "initializer_range": 0.05},
        "steps": 2000, "rows": 64, "learning_rate": 3e-3, "evaluate_every": 200,
    },
}  # fmt: skip
_ARENA_TASKS = {
    "listops": ("listops", "listops-files"), "imdb": ("imdb",), "aan": ("aan",),
    "cifar10": ("cifar10",), "pathfinder": ("pathfinder", "pathfinder-files"),
    "path_x": ("path-x",),
}  # fmt: skip
_POSITIONS = {"listops": 2048, "imdb": 4096, "aan": 4096, "cifar10": 1024, "pathfinder": 1024}
for _name, _settings in SETTINGS.items():
    for _data, _setting in _settings.items():
        for _task in _ARENA_TASKS[_data]:
            PRESETS[f"{_task}/{_name}"] = _arena(_setting, _POSITIONS.get(_data, 16384))


def preset(task: str, name: str) -> dict[str, Any]:
    """Return the choices of a preset: arguments of `Settings`, and `softmax` of `Sweep`.

    Raises:
        ValueError: the task has none of that name.
    """
    known = [key.split("/")[1] for key in PRESETS if key.startswith(f"{task}/")]
    if name not in known:
        reject("setting", repr(name), f"of {task}: {known}" if known else f"none: {task} has none")
    return dict(PRESETS[f"{task}/{name}"])
