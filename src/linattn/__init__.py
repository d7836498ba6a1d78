"""linattn: linear attention, gated linear attention and delta rules, exact and O(N D) in memory."""

from linattn._backends import Backend, backends
from linattn.convolution import causal_conv1d
from linattn.integrations.switch import (
    accelerate,
    accelerate_transformers,
    accelerated,
    decelerate,
)
from linattn.noise import multiplicative_noise
from linattn.ops import linear_attention
from linattn.selective_scan import selective_scan

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "__version__",
    "accelerate",
    "accelerate_transformers",
    "accelerated",
    "backends",
    "causal_conv1d",
    "decelerate",
    "linear_attention",
    "multiplicative_noise",
    "selective_scan",
]
