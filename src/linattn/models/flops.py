"""How much arithmetic a token of training takes, for the share of the machine's rate."""

from __future__ import annotations

from torch import nn

from linattn.layers import SoftmaxAttention
from linattn.models.modeling import LinattnForCausalLM


def training_flops(model: LinattnForCausalLM, length: int) -> float:
    """Return the floating-point operations of a token, forward and backward, at a length.

    6 for every weight of a projection (2 forward, 4 backward), the output layer with them, the
    embedding not; 12 for every number of a linear mixer's state (a write and a read of 2 each
    forward, twice that backward); for softmax 6 for every channel of query and value and token in
    front, length / 2 on average. Norms, gates and what a kernel recomputes do not count.
    """
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    total = 6.0 * weights
    for layer in model.model.layers:
        mixer = layer.mixer
        if isinstance(mixer, SoftmaxAttention):
            before = length / 2 if mixer.window is None else min(length / 2, mixer.window)
            total += 6 * mixer.num_heads * (mixer.key_dim + mixer.value_dim) * before
        else:
            total += 12 * mixer.state_size()
    return total
