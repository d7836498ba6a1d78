"""Tiny models with weights large enough that every part is felt."""

import torch

from linattn.models import LinattnConfig, LinattnForCausalLM
from linattn.models.mixers import MIXERS

HYBRIDS = {
    "hybrid": {"mixer": ["metala", "softmax"]},
    "hybrid window": {
        "mixer": ["gated_delta_net", "softmax"],
        "mixer_options": {"softmax": {"window": 6}},
    },
    "metala without convolution": {"mixer_options": {"metala": {"kernel_size": None}}},
    "learned positions": {"mixer": "gla", "learned_positions": True},
}
KINDS = {**{name: {"mixer": name} for name in MIXERS}, **HYBRIDS}
SOME = ("metala", "lightning", "hybrid", "linear")  # with a convolution, without, both, normalised


def config(kind, **changes):
    sizes = {
        "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    return LinattnConfig(**{**sizes, **KINDS[kind], **changes})


def model(kind, **changes):
    torch.manual_seed(0)
    made = LinattnForCausalLM(config(kind, **changes)).eval()
    with torch.no_grad():  # biases too: a zero one hides padding that leaks
        for p in made.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
    return made


def tokens(*shape):
    return torch.randint(1, 50, shape)
