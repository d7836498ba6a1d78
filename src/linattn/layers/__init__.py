"""Attention layers with one forward signature, so that one word swaps one for another."""

from linattn.layers.bidirectional import Bidirectional
from linattn.layers.cache import (
    ConvolutionCache,
    KeyValueCache,
    RecurrentCache,
    RetentionCache,
    WindowCache,
)
from linattn.layers.delta_net import DeltaNet
from linattn.layers.gated_convolution import GatedConvolution
from linattn.layers.gated_delta_net import GatedDeltaNet
from linattn.layers.gated_linear_attention import GatedLinearAttention
from linattn.layers.hgrn2 import HGRN2
from linattn.layers.kimi_delta_attention import KimiDeltaAttention
from linattn.layers.lightning_attention import LightningAttention
from linattn.layers.linear import LinearAttention
from linattn.layers.mamba2 import Mamba2
from linattn.layers.metala import MetaLA
from linattn.layers.retention import Retention
from linattn.layers.rotary import rotary
from linattn.layers.short_convolution import ShortConvolution
from linattn.layers.softmax import SoftmaxAttention

__all__ = [
    "HGRN2",
    "Bidirectional",
    "ConvolutionCache",
    "DeltaNet",
    "GatedConvolution",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KeyValueCache",
    "KimiDeltaAttention",
    "LightningAttention",
    "LinearAttention",
    "Mamba2",
    "MetaLA",
    "RecurrentCache",
    "Retention",
    "RetentionCache",
    "ShortConvolution",
    "SoftmaxAttention",
    "WindowCache",
    "rotary",
]
