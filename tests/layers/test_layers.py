"""LinearAttention and SoftmaxAttention: one signature, caches, padding, packing, precision."""

import inspect

import pytest
import torch

from linattn.layers import (
    HGRN2,
    DeltaNet,
    GatedConvolution,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LightningAttention,
    LinearAttention,
    Mamba2,
    MetaLA,
    Retention,
    SoftmaxAttention,
)

KINDS = {
    "plain": lambda **o: LinearAttention(32, 4, **o),
    "grouped": lambda **o: LinearAttention(32, 4, num_key_heads=2, **o),
    "affine": lambda **o: LinearAttention(32, 4, qk_norm="l2", bias=1.0, normalize=True, **o),
    "elu": lambda **o: LinearAttention(32, 4, feature_map="elu_plus_one", normalize=True, **o),
    "hedgehog": lambda **o: LinearAttention(
        32, 4, num_key_heads=2, feature_map="hedgehog", normalize=True, **o
    ),
    "taylor": lambda **o: LinearAttention(32, 4, key_dim=4, feature_map="taylor", **o),
    "head": lambda **o: LinearAttention(32, 4, decay="head", **o),
    "token": lambda **o: LinearAttention(32, 4, decay="token", projection_bias=True, **o),
    "channel": lambda **o: LinearAttention(32, 4, num_value_heads=8, decay="channel", **o),
    "affine rope": lambda **o: LinearAttention(
        32, 4, rope=50.0, qk_norm="l2", bias=1.0, normalize=True, **o
    ),
    # Positions in front of what sees more of them than their differences.
    "relu rope": lambda **o: LinearAttention(32, 4, rope=50.0, feature_map="relu", **o),
    "channel rope": lambda **o: LinearAttention(32, 4, rope=50.0, decay="channel", **o),
    "metala": lambda **o: MetaLA(32, 4, **o),
    "metala linear": lambda **o: MetaLA(32, 2, augmentation="linear", kernel_size=2, **o),
    "metala ablated": lambda **o: MetaLA(32, 2, augmentation=None, kernel_size=None, key=True, **o),
    "gla": lambda **o: GatedLinearAttention(32, 2, **o),
    "lightning": lambda **o: LightningAttention(32, 4, depth=0.5, **o),
    "hgrn2": lambda **o: HGRN2(32, 2, lower_bound=0.3, **o),
    "mamba2": lambda **o: Mamba2(32, 4, key_dim=8, value_dim=16, num_key_heads=2, **o),
    "delta": lambda **o: DeltaNet(32, 2, output_gate=True, negative_eigenvalues=True, **o),
    "kimi": lambda **o: KimiDeltaAttention(32, 2, head_dim=8, **o),
    "gated delta": lambda **o: GatedDeltaNet(32, 2, num_value_heads=4, key_dim=8, **o),
    "retention": lambda **o: Retention(32, 2, **o),
    "convolution": lambda **o: GatedConvolution(32, **o),
    "softmax": lambda **o: SoftmaxAttention(32, 4, num_key_heads=2, projection_bias=True, **o),
    "softmax rope": lambda **o: SoftmaxAttention(32, 4, rope=100.0, **o),
    "softmax window": lambda **o: SoftmaxAttention(32, 4, rope=100.0, window=5, **o),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@kinds
@pytest.mark.parametrize("cut", [(1, 95), (37, 59), (48, 48), (95, 1), (90, 1, 1, 1, 3)])
def test_any_cut_with_the_cache_equals_one_pass(kind, cut):
    """Cases D4, D5 and D12."""
    layer = KINDS[kind]()
    x = torch.randn(2, 96, 32)
    whole, last = layer(x, return_cache=True)
    parts, cache = [], None
    for piece in x.split(cut, dim=1):
        before = None if cache is None else [t.clone() for t in cache]
        handed_in = cache
        y, cache = layer(piece, cache=cache, return_cache=True)
        if handed_in is not None:  # D13: what the caller holds is never changed
            assert all(torch.equal(a, b) for a, b in zip(before, handed_in, strict=True))
        parts.append(y)
    close(torch.cat(parts, 1), whole)
    for a, b in zip(cache, last, strict=True):
        close(a.float(), b.float())


@kinds
def test_left_padding_equals_each_row_alone(kind):
    """Case D7: bias in the projections included."""
    layer = KINDS[kind]()
    short, long = torch.randn(1, 3, 32), torch.randn(1, 12, 32)
    x = torch.cat([torch.cat([torch.randn(1, 9, 32), short], 1), long])
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :9] = False
    y, cache = layer(x, mask=mask, return_cache=True)
    close(y[:1, 9:], layer(short))
    close(y[1:], layer(long))
    following = torch.randn(2, 2, 32)
    after = layer(following, cache=cache)
    close(after[:1], layer(torch.cat([short, following[:1]], 1))[:, 3:])
    changed = x.clone()
    changed[0, :9] = torch.randn(9, 32)
    assert torch.equal(layer(changed, mask=mask)[:, 9:], y[:, 9:])


@kinds
def test_decoding_after_right_padding_goes_on_from_the_last_token(kind):
    """And a row of nothing but padding leaves the cache as it was."""
    layer = KINDS[kind]()
    x, following = torch.randn(3, 8, 32), torch.randn(3, 2, 32)
    lengths = [8, 3, 6]
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    _, cache = layer(x, mask=mask, return_cache=True)
    _, cache = layer(x, mask=torch.zeros(3, 8, dtype=torch.bool), cache=cache, return_cache=True)
    y = layer(following, cache=cache)
    for i, n in enumerate(lengths):
        alone = layer(torch.cat([x[i : i + 1, :n], following[i : i + 1]], dim=1))
        close(y[i : i + 1], alone[:, n:], 1e-4)


@kinds
def test_what_stands_in_padding_reaches_nothing(kind):
    """NaN in a padded token: neither outputs nor gradients of any parameter see it."""
    layer = KINDS[kind]()
    x = torch.randn(2, 9, 32)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = mask[1, 7:] = False
    grads = []
    for value in (0.0, torch.nan):
        filled = x.masked_fill(~mask[..., None], value)
        y = layer(filled, mask=mask)
        assert torch.isfinite(y).all()
        grads.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_a_layer_made_on_meta_has_its_constants_after_loading():
    source = LinearAttention(32, 4, decay="head")
    with torch.device("meta"):
        layer = LinearAttention(32, 4, decay="head")
    layer.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(layer.head_log_decay, source.head_log_decay)


@kinds
def test_packed_sequences_equal_separate_ones(kind):
    """Cases D8 and E6, an empty sequence among them."""
    layer = KINDS[kind]()
    lengths = [5, 1, 0, 70, 3]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x = torch.randn(1, 79, 32)
    y = layer(x, cu_seqlens=cu_seqlens)
    separate = [layer(part) for part in x.split(lengths, dim=1) if part.shape[1]]
    close(y, torch.cat(separate, 1))


@kinds
def test_autocast_and_bfloat16(kind):
    """Case D18: bf16 within 3e-2 of float32 (2-norm), gradients in the weights' dtype."""
    layer = KINDS[kind]()
    x = torch.randn(2, 70, 32)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - exact).norm() < 3e-2 * exact.norm()
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    y = layer.bfloat16()(x.bfloat16())
    assert (y.float() - exact).norm() < 3e-2 * exact.norm()


ONE_WAY = (
    "metala",
    "metala linear",
    "metala ablated",
    "gla",
    "lightning",
    "hgrn2",
    "mamba2",
    "delta",
    "kimi",
    "gated delta",
    "retention",
    "softmax window",
    "convolution",
    "channel rope",
)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ONE_WAY])
@pytest.mark.parametrize("causal", [True, False])
def test_every_kind_runs_both_ways(kind, causal):
    """Cases D1 and E7: forward and backward on [2, 16, 64]-like input, causal and not."""
    if not causal and kind in ("head", "token", "channel"):
        with pytest.raises(ValueError, match="decay"):
            KINDS[kind](causal=False)
        return
    layer = KINDS[kind](causal=causal, dropout=0.1)
    x = torch.randn(2, 16, 32, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    depends_on_later = torch.autograd.grad(layer.eval()(x)[:, 3].sum(), x)[0][:, 4:].abs().sum() > 0
    assert bool(depends_on_later) is not causal


@pytest.mark.parametrize("mode", ["gaussian_output", "output", "qk"])
def test_dropout_acts_in_training_only(mode):
    layer = LinearAttention(32, 4, dropout=0.3, dropout_mode=mode)
    x = torch.randn(2, 40, 32)
    torch.manual_seed(1)
    a = layer(x)
    torch.manual_seed(1)
    assert torch.equal(a, layer(x))
    assert not torch.equal(a, layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("kind", ["affine", "token", "metala", "gated delta", "softmax"])
def test_compile_and_export(kind):
    layer = KINDS[kind]().eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for n in (64, 65):
        x = torch.randn(2, n, 32)
        close(compiled(x), layer(x))
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        close(torch.export.export(layer, (x,)).module()(x), layer(x))
        _, cache = layer(x, return_cache=True)
        step = {"cache": cache, "return_cache": True}
        token = torch.randn(2, 1, 32)
        exported = torch.export.export(layer, (token,), step).module()
        close(exported(token, **step)[0], layer(token, cache=cache))


def test_cache_selects_rows_for_beam_search():
    """Case D14."""
    for layer in (LinearAttention(32, 4, bias=1.0, normalize=True), SoftmaxAttention(32, 4)):
        x, token = torch.randn(3, 9, 32), torch.randn(4, 1, 32)
        rows = torch.tensor([2, 0, 0, 1])
        _, cache = layer(x, return_cache=True)
        whole = layer(torch.cat([x[rows], token], 1))[:, -1:]
        close(layer(token, cache=cache.select(rows)), whole)


def test_two_layers_swap_in_one_word():
    linear = inspect.signature(LinearAttention.forward).parameters
    softmax = inspect.signature(SoftmaxAttention.forward).parameters
    assert list(linear) == list(softmax)
    assert all(linear[n].default == softmax[n].default for n in linear)
    shared = set(inspect.signature(SoftmaxAttention).parameters) - {"window"}
    own = inspect.signature(LinearAttention).parameters
    twin = inspect.signature(SoftmaxAttention).parameters
    assert all(own[n].default == twin[n].default for n in shared)


def test_affine_with_unit_norm_keeps_weights_positive():
    """bias >= scale with qk_norm='l2': the output stays inside the hull of the values."""
    layer = LinearAttention(32, 4, qk_norm="l2", bias=1.0, normalize=True)
    torch.nn.init.eye_(layer.o_proj.weight)
    x = torch.randn(2, 50, 32)
    v = layer.v_proj(x)
    y = layer(x)
    assert (y <= v.cummax(1).values + 1e-4).all()
    assert (y >= v.cummin(1).values - 1e-4).all()


@pytest.mark.parametrize("kind", ["plain", "metala", "softmax"])
def test_one_compiled_graph_for_all_packings(kind):
    """Case: the twin asked for the values of cu_seqlens, which a graph does not know."""
    torch.manual_seed(0)
    layer = KINDS[kind]()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(1, 20, 32), torch.rand(1, 20) > 0.3
    for bounds in ([0, 7, 20], [0, 0, 20], [0, 19, 20]):
        cu_seqlens = torch.tensor(bounds)
        for there in (None, mask):
            expected = layer(x, mask=there, cu_seqlens=cu_seqlens)
            torch.testing.assert_close(compiled(x, mask=there, cu_seqlens=cu_seqlens), expected)
