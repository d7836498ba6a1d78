"""Attention layers with one forward signature, so that one word swaps one for another."""

from linattn.layers.cache import KeyValueCache, RecurrentCache
from linattn.layers.linear import LinearAttention
from linattn.layers.softmax import SoftmaxAttention

__all__ = ["KeyValueCache", "LinearAttention", "RecurrentCache", "SoftmaxAttention"]
