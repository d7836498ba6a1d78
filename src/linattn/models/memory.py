"""How much memory a training step takes, counted without taking it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn._validation import require_positive_int
from linattn.models.configuration import LinattnConfig
from linattn.models.modeling import LinattnForCausalLM


class Memory(NamedTuple):
    """Bytes of a training step in float32 with AdamW."""

    parameters: int  # how many, not bytes
    weights: int
    gradients: int
    optimizer: int
    saved: int  # what the forward pass keeps for the backward pass, embedding to loss
    loss: int  # the gradient of the logits and its copy in front of it

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.weights + self.gradients + self.optimizer + self.saved + self.loss


def published_memory(K: int, L: int, H: int, D: int, N: int, B: int = 1) -> int:
    """Return 12 K + 60 L H D N B bytes, the formula of *Making Linear Attention Usable*.

    Args:
        K: parameters; 12 bytes are three float32 numbers for each.
        L: layers.
        H: heads.
        D: channels of a head; 60 bytes are fifteen float32 numbers a token and channel.
        N: tokens of a row.
        B: rows.
    """
    return 12 * K + 60 * L * H * D * N * B


def training_memory(config: LinattnConfig, N: int, B: int = 1) -> Memory:
    """Return the memory of a training step of the language model on [B, N] tokens.

    The model is built and run with fake tensors, which have sizes and no numbers; the count is of
    what autograd saves then, each piece of memory once. The work space of a single operation comes
    on top, and what torch itself takes.

    Raises:
        ValueError: N or B < 1.
    """
    require_positive_int("N", N)
    require_positive_int("B", B)
    with torch.device("meta"):
        K = sum(p.numel() for p in LinattnForCausalLM(config).parameters())
    with FakeTensorMode():
        model = LinattnForCausalLM(config).train()
        saved = saved_bytes(model, torch.zeros(B, N, dtype=torch.int64))
    logits = 4 * B * N * config.vocab_size
    return Memory(K, 4 * K, 4 * K, 8 * K, saved, 2 * logits)


def saved_bytes(model: LinattnForCausalLM, tokens: Tensor) -> int:
    """Return how many bytes autograd keeps after the forward pass and loss of tokens [B, N]."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is given out twice

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens, labels=tokens)
    return sum(storage.nbytes() for storage in kept.values())
