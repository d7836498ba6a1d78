"""`linattn generate`: text from a model, token by token, and how long a token takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase, TextStreamer

from linattn._validation import reject, require_number, require_positive_int, require_seed
from linattn.models import LinattnConfig, LinattnForCausalLM
from linattn.models.loading import from_folder, model_type
from linattn.models.presets import preset
from linattn.models.tokenizers import byte_tokenizer, decode, load_tokenizer
from linattn.train import checkpoints


@dataclass(frozen=True)
class Generated:
    """What was made."""

    text: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens in a second, the prompt's own time included."""
        return self.tokens / self.seconds


class Printable(TextStreamer):
    """Streams text as it is made, without the control characters that a terminal would obey."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of text."""
        print(printable(text), flush=True, end="\n" if stream_end else "")


def printable(text: str) -> str:
    """Return text with "?" for what a terminal might obey or cannot show."""
    kept = (c if (c.isprintable() and c != "\ufffd") or c in "\n\t" else "?" for c in text)
    return "".join(kept)


def load_model(path: Path) -> LinattnForCausalLM:
    """Return the model of a folder, as `load` does."""
    return load(path)[0]


def load(path: Path) -> tuple[LinattnForCausalLM, PreTrainedTokenizerBase]:
    """Return the model and tokenizer of a folder: a saved model, or a training run's newest.

    Raises:
        ValueError: neither is there, or not whole.
    """
    newest = checkpoints.latest(path) if path.is_dir() else None
    folder = path if newest is None else newest
    if not (folder / "config.json").is_file():
        reject("model", path, "the folder of a saved model or of a training run")
    kind = model_type(folder)
    if kind != LinattnConfig.model_type:
        reject("model", f"{folder}, a {kind!r}", f"a {LinattnConfig.model_type!r}")
    return from_folder(LinattnForCausalLM, folder), load_tokenizer(str(folder))


def untrained(name: str, mixer: str, seed: int = 0) -> LinattnForCausalLM:
    """Return a model of bytes with its first weights: to time, not to read."""
    torch.manual_seed(seed)
    model = LinattnForCausalLM(preset(name, mixer, vocab_size=256))
    model.train(False)
    return model


@torch.inference_mode()
def generate(
    model: LinattnForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    stream: bool = False,
) -> Generated:
    """Return `tokens` tokens of text after a prompt.

    One pass for the prompt, then one a token, each of constant time and memory with a linear
    mixer, whatever came before.

    Args:
        model: a language model.
        tokenizer: its tokenizer; None: of bytes.
        prompt: text to go on from.
        tokens: how many.
        temperature: 0 takes the likeliest token every time.
        top_p: the likeliest tokens that make up this share are drawn from.
        seed: of the draws.
        stream: print the text as it is made.

    Raises:
        ValueError: an empty prompt, tokens < 1, a temperature between 0 and 0.001 or < 0, top_p not
            in (0, 1], a seed not in 0 .. 2**40, a prompt that is no text.
    """
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    require_positive_int("tokens", tokens)
    for name, value, good in (
        ("temperature", temperature, temperature == 0 or temperature >= 1e-3),
        ("top_p", top_p, 0 < top_p <= 1),
    ):  # fmt: skip
        require_number(name, value)
        if not good:
            reject(name, value, "0, or 0.001 or more" if name == "temperature" else
                   "a share in (0, 1]")  # fmt: skip
    require_seed(seed)
    try:
        prompt.encode()
    except UnicodeEncodeError:
        reject("prompt", ascii(prompt), "text in UTF-8")
    x = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    if x.numel() == 0:
        reject("prompt", "no tokens", "at least one")
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    torch.manual_seed(seed)
    start = time.perf_counter()
    made: Tensor = model.generate(
        x,
        attention_mask=torch.ones_like(x),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        eos_token_id=None,
        streamer=Printable(tokenizer) if stream else None,
        **options,
    )
    seconds = time.perf_counter() - start
    return Generated(decode(tokenizer, made[0, x.shape[1] :].tolist()), tokens, seconds)


@torch.inference_mode()
def latency(
    model: LinattnForCausalLM, lengths: list[int], repeats: int = 32
) -> list[dict[str, float]]:
    """Return how long one token takes after each of lengths tokens: the median of some.

    Rows have "tokens" in front, "seconds" a token, and "bytes" of the cache then.
    """
    cache = DynamicCache(config=model.config)
    rows, seen = [], 0
    for length in sorted(lengths):
        if length > seen:
            x = torch.randint(model.config.vocab_size, (1, length - seen))
            model(x, cache=cache, logits_to_keep=1)
            seen = length
        times = []
        for _ in range(repeats):
            token = torch.randint(model.config.vocab_size, (1, 1))
            start = time.perf_counter()
            model(token, cache=cache)
            times.append(time.perf_counter() - start)
            seen += 1
        middle = sorted(times)[repeats // 2]
        rows.append({"tokens": length, "seconds": middle, "bytes": float(cache_bytes(cache))})
    return rows


def cache_bytes(cache: DynamicCache) -> int:
    """Return the bytes of a cache's tensors."""
    found: list[Any] = []
    for layer in cache.layers:
        found += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in ("recurrent_states", "conv_states"):
            found += getattr(layer, states, {}).values()
    return sum(x.numel() * x.element_size() for x in found if isinstance(x, Tensor))
