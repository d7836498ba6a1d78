"""Saved models; a damaged or foreign folder is an error, not a model that is half random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

from linattn._validation import reject


def from_folder(kind: Any, folder: Path) -> Any:
    """Return a model with all its weights from a folder, in evaluation mode.

    Args:
        kind: a model class of this library, or an Auto class of transformers.
        folder: with config.json and safetensors; nothing else is read, pickles least of all.

    Raises:
        ValueError: a file that is missing or damaged, or weights that are not those of the
            configuration.
    """
    expected = "the folder of a saved model, whole"
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its report of missing weights is the error below
    try:
        model, found = kind.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (
        OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError
    ) as error:  # fmt: skip
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        reject("model", f"{folder} ({first})", expected)
    finally:
        logging.set_verbosity(verbosity)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    tied = tied if getattr(model.config, "tie_word_embeddings", False) else set()
    wrong = sorted(
        {*found["missing_keys"]} - tied
        | {*found["unexpected_keys"]}
        | {str(key) for key in found["mismatched_keys"]}
    )
    if wrong:
        got = f"{folder} with {len(wrong)} weights that do not fit its config.json, as {wrong[0]}"
        reject("model", got, expected)
    model.train(False)
    return model


def model_type(folder: Path) -> str:
    """Return the model type of a folder's config.json.

    Raises:
        ValueError: no such file, or one that is no configuration.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reject("model", f"{path} ({type(error).__name__}: {error})", "a saved model's config.json")
    return str(found)
