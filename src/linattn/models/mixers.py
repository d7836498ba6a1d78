"""The mixers of a model by name, each with the defaults it has there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from linattn._validation import reject
from linattn.layers import (
    HGRN2,
    Bidirectional,
    DeltaNet,
    GatedConvolution,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LightningAttention,
    LinearAttention,
    Mamba2,
    MetaLA,
    Retention,
    SoftmaxAttention,
)

if TYPE_CHECKING:
    from linattn.models.configuration import LinattnConfig


def _convolution(dim: int, heads: int, *, kernel_size: int = 3, backend: str = "auto") -> nn.Module:
    """Return a mixer without heads."""
    return GatedConvolution(dim, kernel_size=kernel_size, backend=backend)


MIXERS: dict[str, Callable[..., nn.Module]] = {
    "metala": MetaLA,
    "retention": Retention,
    "lightning": LightningAttention,
    "gla": GatedLinearAttention,
    "hgrn2": HGRN2,
    "mamba2": Mamba2,
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "linear": LinearAttention,
    "convolution": _convolution,
    "softmax": SoftmaxAttention,
}
BOTH_WAYS = ("linear", "softmax")  # these see every token by themselves; others need two


def defaults(name: str, dim: int, heads: int, layer: int, layers: int) -> dict[str, Any]:
    """Return the options of a mixer in a model, where they are not those of the layer itself.

    layer counts from 0 to layers - 1: some forget less the deeper they are.
    """
    if name == "lightning":
        return {"depth": layer / layers}
    if name == "hgrn2":  # what the learned bounds of the released model begin with
        return {"lower_bound": layer / layers}
    if name == "mamba2":  # expansion 2, as published
        return {"value_dim": 2 * dim // heads}
    if name == "gated_delta_net":
        return {"key_dim": dim // heads, "value_dim": dim // heads}
    if name == "kda":
        return {"head_dim": dim // heads}
    if name == "linear":  # the affine kernel of weights >= 0
        return {"qk_norm": "l2", "bias": 1.0, "normalize": True, "rope": 10000.0}
    return {"rope": 10000.0} if name == "softmax" else {}


def check_options(name: str, options: object) -> None:
    """Raise unless name is a mixer and options are some of its keyword arguments."""
    if name not in MIXERS:
        reject("mixer", repr(name), f"one of {tuple(MIXERS)}")
    if not isinstance(options, dict):
        reject("mixer_options", f"{options!r} for {name!r}", "a dict of options", kind=TypeError)
    known = [
        p.name
        for p in inspect.signature(MIXERS[name]).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    for option in options:
        if option not in known:
            reject("mixer_options", f"{option!r} for {name!r}", f"some of {known}", kind=TypeError)


def build(config: LinattnConfig, layer: int) -> nn.Module:
    """Return the mixer of a layer of the model; bidirectional where the model is."""
    name = config.mixers[layer]
    dim, heads = config.hidden_size, config.num_attention_heads
    options = defaults(name, dim, heads, layer, config.num_hidden_layers)
    options |= (config.mixer_options or {}).get(name, {})
    if not config.bidirectional:
        return MIXERS[name](dim, heads, **options)
    if name in BOTH_WAYS:
        return MIXERS[name](dim, heads, **{**options, "causal": False})
    return Bidirectional(MIXERS[name](dim, heads, **options))
