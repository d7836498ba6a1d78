"""What the layers refuse, in words."""

import pytest
import torch

from linattn.feature_maps import Hedgehog
from linattn.layers import LinearAttention, SoftmaxAttention

X = torch.randn(2, 6, 32)
BAD = {
    "dim": (lambda: LinearAttention(30, 4), ["dim", "30", "multiple of num_heads = 4"]),
    "heads": (lambda: LinearAttention(32, 4, num_key_heads=3), ["num_key_heads", "3", "4"]),
    "map": (lambda: LinearAttention(32, 4, feature_map="gelu"), ["feature_map", "gelu", "taylor"]),
    "norm": (lambda: LinearAttention(32, 4, qk_norm="max"), ["qk_norm", "max", "l2"]),
    "dropout": (lambda: LinearAttention(32, 4, dropout=1.5), ["dropout", "1.5", "[0, 1)"]),
    "backend": (lambda: LinearAttention(32, 4, backend="gpu"), ["backend", "gpu", "chunked"]),
    "decay": (lambda: LinearAttention(32, 4, decay="fast"), ["decay", "fast", "token"]),
    "channel": (
        lambda: LinearAttention(32, 4, decay="channel", normalize=True),
        ["normalize: got True", "channel"],
    ),
    "x": (lambda: LinearAttention(32, 4)(X[..., :31]), ["x", "[2, 6, 31]", "[B, N, 32]"]),
    "mask": (
        lambda: LinearAttention(32, 4)(X, mask=torch.ones(2, 5, dtype=torch.bool)),
        ["mask", "[2, 5]", "[2, 6]"],
    ),
    "softmax mask": (
        lambda: SoftmaxAttention(32, 4)(X, mask=torch.ones(2, 6)),
        ["mask", "float32", "bool"],
    ),
    "cache": (
        lambda: LinearAttention(32, 4)(X, cache=SoftmaxAttention(32, 4)(X, return_cache=True)[1]),
        ["cache", "KeyValueCache", "RecurrentCache"],
    ),
    "both ways": (
        lambda: SoftmaxAttention(32, 4, causal=False)(X, return_cache=True),
        ["cache", "causal=False"],
    ),
    "map type": (lambda: LinearAttention(32, 4, feature_map=["relu"]), ["feature_map", "relu"]),
    "projection": (lambda: LinearAttention(32, 4, projection_bias="no"), ["projection_bias", "no"]),
    "hedgehog": (lambda: Hedgehog(0, 4), ["num_heads", "0", "an int >= 1"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, fragments = BAD[name]
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)
