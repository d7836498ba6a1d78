"""SoftmaxAttention: rotary positions, the window, and attention that no one here wrote."""

import pytest
import torch

from linattn.layers import SoftmaxAttention, rotary


def loop(layer, x):
    """Softmax attention of x [B, N, dim] token by token, as the equation says."""
    q, k, v = (
        p(x).unflatten(-1, (-1, layer.key_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    angle = layer.rope ** (-torch.arange(0, layer.key_dim, 2).double() / layer.key_dim)

    def turned(y, t):
        a, b = y.chunk(2, -1)
        cos, sin = torch.cos(t * angle), torch.sin(t * angle)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    rows = []
    for t in range(x.shape[1]):
        first = 0 if layer.window is None else max(0, t - layer.window + 1)
        keys = torch.stack([turned(k[:, s], s) for s in range(first, t + 1)], 1)
        scores = torch.einsum("bhd,bshd->bhs", turned(q[:, t], t), keys) * layer.scale
        rows.append(torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v[:, first : t + 1]))
    return layer.o_proj(torch.stack(rows, 1).flatten(-2))


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_rotary_positions_and_window_against_the_equation(window):
    layer = SoftmaxAttention(12, 2, rope=100.0, window=window).double()
    x = torch.randn(2, 13, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), loop(layer, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [(20,), (1,) * 20, (7, 13), (3, 1, 16)])
def test_the_cache_of_a_window_stays_small_and_loses_nothing(lengths):
    layer = SoftmaxAttention(12, 2, rope=100.0, window=4).double()
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    mask = torch.rand(2, 20) > 0.3
    cache, parts = None, []
    for piece, there in zip(x.split(lengths, 1), mask.split(lengths, 1), strict=True):
        y, cache = layer(piece, mask=there, cache=cache, return_cache=True)
        parts.append(y)
        assert cache.key.shape[1] <= 3
    assert torch.equal(cache.seen, mask.sum(1))
    y = torch.cat(parts, 1)
    for row in range(2):
        alone = layer(x[row : row + 1, mask[row]])
        torch.testing.assert_close(y[row, mask[row]], alone[0], rtol=1e-10, atol=1e-10)
    assert layer.state_size(100) == 3 * 2 * 12


def test_angles_are_exact_a_million_tokens_away():
    """The same distance gives the same product, wherever it lies: float32 angles would not."""
    q, k = torch.randn(2, 1, 1, 1, 64)
    products = []
    for start in (0, 1_000_000):
        a = rotary(q, torch.tensor([start + 37]))
        b = rotary(k, torch.tensor([start]))
        products.append((a * b).sum())
    torch.testing.assert_close(*products, rtol=1e-5, atol=1e-5)


def test_same_weights_same_outputs_as_llama_and_mistral():
    """Attention with rotary positions, grouped heads and a window that no one here wrote."""
    pytest.importorskip("transformers")
    from transformers import MistralConfig
    from transformers.models.mistral.modeling_mistral import MistralModel

    for window in (None, 5):
        config = MistralConfig(
            vocab_size=11, hidden_size=32, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=window,
            attn_implementation="sdpa",
        )  # fmt: skip
        theirs = MistralModel(config).eval()
        seen = {}
        theirs.layers[0].self_attn.register_forward_hook(
            lambda module, args, kwargs, out, seen=seen: seen.update(
                x=kwargs["hidden_states"], y=out[0]
            ),
            with_kwargs=True,
        )
        theirs(torch.randint(11, (2, 30)))
        ours = SoftmaxAttention(32, 4, num_key_heads=2, rope=10000.0, window=window)
        ours.load_state_dict(theirs.layers[0].self_attn.state_dict())
        torch.testing.assert_close(ours(seen["x"]), seen["y"], rtol=1e-4, atol=1e-5)


X = torch.randn(2, 6, 32)


def _longer_keys():
    cache = SoftmaxAttention(32, 4)(X, return_cache=True)[1]
    return cache._replace(key=torch.cat([cache.key, cache.key[:, :1]], 1))


BAD = {
    "softmax cache of another batch": (
        lambda: SoftmaxAttention(32, 4)(
            X, cache=SoftmaxAttention(32, 4)(X[:1], return_cache=True)[1]
        ),
        ["cache.seen", "[1]", "[2]"],
    ),
    "softmax cache of unlike lengths": (
        lambda: SoftmaxAttention(32, 4)(X, cache=_longer_keys()),
        ["cache", "[7, 6, 6]", "as many of each"],
    ),
    "softmax cache of another dtype": (
        lambda: SoftmaxAttention(32, 4)(
            X, cache=SoftmaxAttention(32, 4).double()(X.double(), return_cache=True)[1]
        ),
        ["cache.key", "float64", "float32"],
    ),
    "softmax heads": (
        lambda: SoftmaxAttention(32, 4, num_key_heads=3),
        ["num_key_heads", "3", "num_heads = 4"],
    ),
    "rope": (lambda: SoftmaxAttention(32, 4, rope=1.0), ["rope", "1.0", "> 1"]),
    "odd": (lambda: SoftmaxAttention(20, 4, rope=100.0), ["key_dim", "5", "even"]),
    "window": (lambda: SoftmaxAttention(32, 4, window=0), ["window", "0", ">= 1"]),
    "window both ways": (
        lambda: SoftmaxAttention(32, 4, window=3, causal=False),
        ["window", "causal=False"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, fragments = BAD[name]
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)
