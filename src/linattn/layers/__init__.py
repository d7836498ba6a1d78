"""Attention layers with one forward signature, so that one word swaps one for another."""

from linattn.layers.cache import ConvolutionCache, KeyValueCache, RecurrentCache
from linattn.layers.linear import LinearAttention
from linattn.layers.metala import MetaLA
from linattn.layers.short_convolution import ShortConvolution
from linattn.layers.softmax import SoftmaxAttention

__all__ = [
    "ConvolutionCache",
    "KeyValueCache",
    "LinearAttention",
    "MetaLA",
    "RecurrentCache",
    "ShortConvolution",
    "SoftmaxAttention",
]
