"""Models by name: the published sizes, and small ones of equal size for every mixer."""

from __future__ import annotations

from typing import Any

import torch

from linattn._validation import reject
from linattn.models import mixers
from linattn.models.configuration import LinattnConfig

_METALA = {"num_hidden_layers": 24, "num_attention_heads": 8, "norm_affine": False}

# Sources: the MetaLA models, Chou et al. 2024 and the configuration released with them (24 layers,
# 8 heads, norms without weights); the shape of Pythia-14M, Biderman et al. 2023.
PRESETS: dict[str, dict[str, Any]] = {
    "bytes-800k": {
        "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "initializer_range": 0.05,
    },
    "pythia-14m": {
        "vocab_size": 50304, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "tie_word_embeddings": False,
    },
    "metala-360m": {**_METALA, "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 2816},
    "metala-380m": {
        **_METALA, "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
        "tie_word_embeddings": False,
    },
    "metala-1.3b": {**_METALA, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 5632},
    "metala-1.4b": {
        **_METALA, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 5632,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def preset(name: str, mixer: str | list[str] = "metala", **changes: Any) -> LinattnConfig:
    """Return the configuration of a preset, with this mixer and these changes.

    Where neither the preset nor a change says how wide the feed-forward part is, it is as wide as
    makes mixer and feed-forward part together 12 hidden_size^2 parameters a layer, so that models
    of one preset are of one size whatever their mixer.

    Raises:
        ValueError: an unknown name; TypeError, ValueError: what `LinattnConfig` refuses.
    """
    if name not in PRESETS:
        reject("preset", repr(name), f"one of {tuple(PRESETS)}")
    config = LinattnConfig(**{**PRESETS[name], "mixer": mixer, **changes})
    if "intermediate_size" not in {**PRESETS[name], **changes}:
        config.intermediate_size = equal_feed_forward(config)
    return config


def equal_feed_forward(config: LinattnConfig) -> int:
    """Return the width that gives 12 hidden_size^2 parameters a layer, a multiple of 8.

    Raises:
        ValueError: the mixers alone have more.
    """
    dim, layers = config.hidden_size, config.num_hidden_layers
    with torch.device("meta"):
        built = [mixers.build(config, i) for i in range(layers)]
    mixing = sum(p.numel() for m in built for p in m.parameters()) / layers
    width = round((12 * dim**2 - mixing) / (3 * dim) / 8) * 8
    if width < 8:
        got = f"{mixing:,.0f} parameters a layer"
        reject("mixer", got, f"less than 12 hidden_size^2 = {12 * dim**2:,}")
    return width
