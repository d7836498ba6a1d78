"""What the layers refuse, in words."""

import pytest
import torch

from linattn.feature_maps import Hedgehog
from linattn.layers import (
    Bidirectional,
    LinearAttention,
    RecurrentCache,
    Retention,
    RetentionCache,
    SoftmaxAttention,
)

X = torch.randn(2, 6, 32)


def _retention_cache(seen):
    return RetentionCache(Retention(32, 2)(X, return_cache=True)[1].state, seen)


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
    "x of integers": (
        lambda: LinearAttention(32, 4)(X.long()),
        ["x", "int64", "floating point"],
    ),
    "no state": (
        lambda: LinearAttention(32, 4)(X, cache=RecurrentCache(None)),
        ["cache.state", "NoneType"],
    ),
    "seen of another batch": (
        lambda: Retention(32, 2)(X, cache=_retention_cache(torch.tensor([6]))),
        ["cache.seen", "[1]", "[2]"],
    ),
    "seen of floats": (
        lambda: LinearAttention(32, 4, rope=9.0)(X, cache=_retention_cache(torch.ones(2))),
        ["cache.seen", "float32", "int64"],
    ),
    "mask both ways": (
        lambda: Bidirectional(Retention(32, 2))(X, mask=torch.ones(2, 5, dtype=torch.bool)),
        ["mask", "[2, 5]", "[2, 6]"],
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
