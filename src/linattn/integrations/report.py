"""A model of transformers before and after `accelerate`: tokens a second, and logits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linattn
from linattn._validation import reject, require_positive_int

# Models of about 100 M parameters with random weights: class of the configuration, and its sizes.
WIDE = {"vocab_size": 32000, "hidden_size": 768, "tie_word_embeddings": True}
MIXED = ["linear_attention"] * 3 + ["full_attention"]
DENSE = {"mlp_layer_types": ["dense"] * 8}
BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-100m": ("MambaConfig", {**WIDE, "num_hidden_layers": 22}),
    "mamba2-100m": (
        "Mamba2Config",
        {**WIDE, "num_hidden_layers": 22, "num_heads": 24, "n_groups": 1, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "qwen3.5-100m": (
        "Qwen3_5TextConfig",
        {**WIDE, "num_hidden_layers": 8, "layer_types": MIXED * 2, "intermediate_size": 2048,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128,
         "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128},
    ),
    "kimi-linear-100m": (
        "KimiLinearConfig",
        {**WIDE, **DENSE, "num_hidden_layers": 8, "layer_types": MIXED * 2,
         "intermediate_size": 2048, "num_attention_heads": 6, "num_key_value_heads": 6,
         "linear_num_heads": 6, "linear_head_dim": 128, "kv_lora_rank": 128,
         "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What one kind of work reaches.

    Attributes:
        work: "prefill", "decode" or "training".
        before, after: tokens a second, the best of the repetitions.
    """

    work: str
    before: float
    after: float


def load(name: str, dtype: torch.dtype) -> Any:
    """Return a model: of a folder that `save_pretrained` wrote, or a built-in one by its name.

    Raises:
        ValueError: neither a folder with a config.json nor a name of BUILT_IN.
    """
    import transformers

    if name in BUILT_IN:
        kind, sizes = BUILT_IN[name]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**sizes)
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if not (Path(name) / "config.json").is_file():
        reject("model", repr(name), f"a folder with a config.json, or one of {tuple(BUILT_IN)}")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    return model.eval()


def measure(
    model: Any, *, tokens: int = 512, decoded: int = 16, repeats: int = 3, training: bool = True
) -> tuple[list[Row], float]:
    """Return tokens a second of each kind of work, and the largest difference of a logit.

    model: a causal language model on a CPU. tokens: of prefill and training, one row of random
    ones; `decoded` follow them one by one. Both ways take turns in one process.
    """
    for name, value in (("tokens", tokens), ("decoded", decoded), ("repeats", repeats)):
        require_positive_int(name, value)
    x = torch.randint(model.config.get_text_config().vocab_size, (1, tokens))

    def prefill() -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(x, use_cache=False).logits
            return logits

    def decode(cache: Any) -> None:
        with torch.inference_mode():
            for _ in range(decoded):
                model(x[:, :1], cache=cache, use_cache=True)

    def train() -> None:
        model.train()
        model.zero_grad()
        model(x, labels=x, use_cache=False).loss.backward()
        model.eval()

    def timed(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def decoding() -> float:
        with torch.inference_mode():
            cache = model(x, use_cache=True).cache
        return timed(lambda: decode(cache))

    plain = prefill()
    with linattn.accelerated(model):
        difference = (prefill().float() - plain.float()).abs().max().item()
    works: dict[str, tuple[int, Callable[[], float]]] = {
        "prefill": (tokens, lambda: timed(prefill)), "decode": (decoded, decoding),
    }  # fmt: skip
    if training:
        works["training"] = (tokens, lambda: timed(train))
    rows = []
    for work, (count, run) in works.items():
        before, after = float("inf"), float("inf")
        for _ in range(repeats):
            before = min(before, run())
            with linattn.accelerated(model):
                after = min(after, run())
        rows.append(Row(work, count / before, count / after))
    model.zero_grad()
    return rows, difference
