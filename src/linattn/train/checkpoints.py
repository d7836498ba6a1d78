"""Checkpoints of a training run: whole or not there, in safetensors, without pickle."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from linattn._validation import reject
from linattn.models import LinattnForCausalLM

NAME = "checkpoint-{:08d}"
State = dict[str, Any]


def save(
    folder: Path,
    step: int,
    model: LinattnForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: State,
) -> Path:
    """Write checkpoint `step` below folder, then remove older ones; return where it is.

    It is written beside its place and moved there when all of it is on disk: a kill at any moment
    leaves this one or the one before, whole.

    Raises:
        OSError: the disk is full or not writable; the last good checkpoint is still there.
    """
    place = folder / NAME.format(step)
    beside = folder / f"{place.name}.tmp"
    before = latest(folder)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        save_file(flat_state(optimizers), beside / "optimizer.safetensors")
        (beside / "progress.json").write_text(json.dumps({**progress, "step": step}, indent=1))
        for path in beside.iterdir():
            _to_disk(path)
        if place.exists():
            shutil.rmtree(place)
        beside.replace(place)
        _to_disk(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        kept = "there is none before it" if before is None else f"{before} is kept"
        raise OSError(f"checkpoint {place} could not be written ({error}); {kept}") from error
    for old in found(folder):
        if old != place:
            shutil.rmtree(old, ignore_errors=True)
    return place


def _to_disk(path: Path) -> None:
    """Have the system write a file or a folder's entries out, where it can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # a folder on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def found(folder: Path) -> list[Path]:
    """Return the whole checkpoints below folder, oldest first."""
    return sorted(
        p for p in folder.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d{8,}", p.name) and (p / "progress.json").is_file()
    )  # fmt: skip


def latest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint below folder, None if there is none."""
    return (found(folder) or [None])[-1]  # type: ignore[list-item]


def starting_point(folder: Path, settings: State, resume: bool) -> Path | None:
    """Return the checkpoint to start from, None for the beginning.

    settings may differ from those of the checkpoint in `steps` and how often it scores and saves.

    Raises:
        ValueError: a folder that is a file; one that holds a run already and resume is False; no
            checkpoint of these settings and resume is True.
    """
    if folder.exists() and not folder.is_dir():
        reject("output", f"{folder}, a file", "a folder")
    newest = latest(folder)
    if not resume:
        if newest is not None:  # a log alone is of a run that was cut before it had one
            reject("output", f"{folder}, which holds a run", "another folder, or --resume")
        return None
    if newest is None:
        reject("output", f"{folder} without a checkpoint", "the folder of a run, to resume it")
    assert newest is not None
    before = progress_of(newest)["settings"]
    free = {"steps", "evaluate_every", "checkpoint_every"}
    now = json.loads(json.dumps(settings))
    changed = sorted(key for key in now if key not in free and now[key] != before.get(key))
    if changed:
        got = ", ".join(f"{key} = {now[key]!r}, not {before.get(key)!r}" for key in changed)
        reject("settings", got, f"those of {newest}")
    return newest


def progress_of(checkpoint: Path, text: str | None = None) -> State:
    """Return what `save` was told of the run.

    text: the digest of the text that the run is to go on with.

    Raises:
        ValueError: a file that `save` did not write, or a run on another text.
    """
    path = checkpoint / "progress.json"
    try:
        state: State = json.loads(path.read_text())
        found = isinstance(state, dict) and {"settings", "step"} <= state.keys()
    except ValueError:
        found = False
    if not found:
        reject("checkpoint", f"{path}, which is damaged", "what the run wrote; or start anew")
    if text is not None and state.get("text") != text:
        reject("data", "a text that has changed since the run began", "the same files as then")
    return state


def restore(
    checkpoint: Path,
    model: LinattnForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Load weights and optimiser state of a checkpoint into a model and its optimisers.

    Raises:
        ValueError: tensors of another model or optimiser, or a damaged file.
    """
    weights = _tensors(checkpoint / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {name for name in missing if name == "lm_head.weight"}
    if unexpected or set(missing) - tied or (tied and not model.config.tie_word_embeddings):
        reject("checkpoint", f"{checkpoint} with other weights", "one of the same model")
    state = _tensors(checkpoint / "optimizer.safetensors")
    names = sorted(key for i, o in enumerate(optimizers) for key in _names(i, o))
    if {key.rsplit(".", 1)[0] for key in state} - set(names):
        reject("checkpoint", f"{checkpoint} of another optimiser", "one of the same run")
    for i, optimizer in enumerate(optimizers):
        full = optimizer.state_dict()
        full["state"] = {
            j: {
                key.rsplit(".", 1)[1]: value
                for key, value in state.items()
                if key.rsplit(".", 1)[0] == name
            }
            for j, name in enumerate(_names(i, optimizer))
        }
        optimizer.load_state_dict(full)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        reject("checkpoint", f"{path} ({error})", "what the run wrote; or start anew")


def flat_state(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the state of optimisers as tensors by name: optimiser, parameter, entry."""
    return {
        f"{i}.{j}.{key}": torch.as_tensor(value).contiguous()
        for i, optimizer in enumerate(optimizers)
        for j, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def _names(i: int, optimizer: torch.optim.Optimizer) -> list[str]:
    return [f"{i}.{j}" for j in range(sum(len(g["params"]) for g in optimizer.param_groups))]
