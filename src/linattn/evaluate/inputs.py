"""One sequence for each model whose attention maps are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn._validation import reject, require_positive_int
from linattn.evaluate import models, sweep, tasks, trial
from linattn.evaluate.batches import inputs
from linattn.generate import untrained
from linattn.models.tokenizers import byte_tokenizer

Given = tuple[str, Any, dict[str, Tensor]]


def models_and_inputs(
    paths: list[Path], mixers: list[str], preset: str, text: Path | None, tokens: int
) -> Iterator[Given]:
    """Yield name, model and one row of inputs.

    A trial reads the first example of its test; a language model the beginning of a text.

    Args:
        paths: saved models, runs or trials; none: models of `mixers` with first weights.
        mixers: names.
        preset: sizes of a model with first weights.
        text: a file; None: the source of Python's module `abc`.
        tokens: of the text, at least 2.

    Raises:
        ValueError: a path that is no model, a text that is shorter or no UTF-8.
    """
    require_positive_int("tokens", tokens)
    if tokens < 2:
        reject("tokens", tokens, "at least 2")
    words = _words(text)
    for path in paths:
        result = path / "result.json"
        if result.exists():
            found = trial.read(result)["settings"]
            yield (
                f"{'+'.join(found['mixer'])} ({path.name})",
                models.load_any(path),
                _example(found),
            )
        else:
            model, tokenizer = models.load(path)
            yield str(path), model, _beginning(words, tokenizer, tokens)
    for mixer in [] if paths else mixers:
        yield mixer, untrained(preset, mixer), _beginning(words, byte_tokenizer(), tokens)


def _words(text: Path | None) -> str:
    if text is None:
        import abc

        text = Path(str(abc.__file__))
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reject("text", f"{text} ({error})", "a text file in UTF-8")


def _beginning(words: str, tokenizer: Any, tokens: int) -> dict[str, Tensor]:
    found = tokenizer(words, add_special_tokens=False)["input_ids"][:tokens]
    if len(found) < tokens:
        reject("text", f"{len(found)} tokens", f"at least tokens = {tokens}")
    return {"input_ids": torch.tensor([found])}


def _example(settings: dict[str, Any]) -> dict[str, Tensor]:
    s = sweep.settings_of(settings)
    where = None if s.path is None else Path(s.path)
    data = tasks.get(s.task).data("test", s.tests[0], 1, s.seed, where)
    found = inputs(data, slice(0, 1))
    if "attention_mask" in found:  # without the padding there is nothing to leave out
        kept = int(found.pop("attention_mask").sum(-1).max())
        found["input_ids"] = found["input_ids"][..., :kept]
    return {name: x for name, x in found.items() if name not in ("labels", "shift_labels")}
