"""What the models of transformers call, on this library's operators.

Each function has the name and the parameters of one in transformers' modeling files, where a CPU
runs it in plain tensor code. They name every keyword that changes the result; those that do not are
IDLE (`arguments.py`); anything else is an error, since a model that passes it would expect it to be
honoured. Sums and states are in float32, as in the plain code.
"""

from linattn.integrations.convolution import causal_conv1d_fn, causal_conv1d_update
from linattn.integrations.delta_rule import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from linattn.integrations.lightning import minimax_lightning_attention
from linattn.integrations.mamba import mamba_selective_scan, mamba_selective_state_update
from linattn.integrations.mamba2 import mamba2_chunk_scan, mamba2_selective_state_update

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "mamba_selective_scan",
    "mamba_selective_state_update",
    "minimax_lightning_attention",
    "recurrent_kimi_delta_attention",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
]
