"""The models that evaluations read: saved ones, training runs, trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)

from linattn._validation import reject
from linattn.models.loading import from_folder, model_type
from linattn.models.tokenizers import byte_tokenizer, load_tokenizer
from linattn.train import checkpoints


def load(path: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return the language model and tokenizer of a folder, from safetensors alone.

    Args:
        path: a model that transformers saved, of any kind; a run of `linattn train`; or a trial of
            `linattn eval`, whose tokens are bytes if it has 256 of them.

    Raises:
        ValueError: none of these, or a trial of other tokens.
    """
    folder = _folder(path)
    model = from_folder(AutoModelForCausalLM, folder)
    if any(folder.glob("tokenizer*")):
        return model, load_tokenizer(str(folder))
    if model.config.vocab_size != 256:
        got = f"{path} without a tokenizer, of {model.config.vocab_size} tokens"
        reject("model", got, "a folder with a tokenizer, or a model of 256 bytes")
    return model, byte_tokenizer()


def load_any(path: Path) -> Any:
    """Return the model of a folder, language model or classifier, without a tokenizer.

    Raises:
        ValueError: there is none.
    """
    folder = _folder(path)
    model_type(folder)
    kinds = {
        "LinattnForCausalLM": AutoModelForCausalLM,
        "LinattnForSequenceClassification": AutoModelForSequenceClassification,
        "LinattnForImageClassification": AutoModelForImageClassification,
    }
    names = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    if names[0] not in kinds:
        reject("model", f"{path}, a {names[0]!r}", f"one of {tuple(kinds)}")
    return from_folder(kinds[names[0]], folder)


def check_length(name: str, model: Any, tokens: int) -> None:
    """Raise if a model with learned positions has fewer than so many tokens."""
    config = model.config
    own = getattr(config, "learned_positions", None)
    learned = bool(own) if own is not None else config.model_type in LEARNED_POSITIONS
    most = getattr(config, "max_position_embeddings", None)
    if learned and most is not None and tokens > most:
        reject(name, tokens, f"at most {most} tokens, the positions of {type(model).__name__}")


LEARNED_POSITIONS = ("gpt2", "gpt_neo", "opt", "bigbird_pegasus", "xglm", "biogpt", "codegen")


def _folder(path: Path) -> Path:
    newest = checkpoints.latest(path) if path.is_dir() else None
    for folder in (path, path / "model", *([] if newest is None else [newest])):
        if (folder / "config.json").is_file():
            return folder
    reject("model", path, "the folder of a saved model, of a training run or of a trial")
