"""The gated layers and those of the delta rule against their equations, and strangers."""

import pytest
import torch
from torch.nn import functional as F

from linattn.layers import (
    HGRN2,
    DeltaNet,
    GatedConvolution,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba2,
    Retention,
    SoftmaxAttention,
)


def enlarged(layer):
    """Large weights in float64, so that every part is felt."""
    torch.manual_seed(0)
    layer = layer.double()
    if isinstance(layer, Retention):
        layer.reset_parameters()  # its constants again, unrounded
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.dim() > 1 else 0.3))
    return layer


def normed(layer, o):
    return o / (o.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight


def silu(x):
    return x * torch.sigmoid(x)


def gated_linear_attention(layer, x):
    H = layer.num_heads
    q, k, v = (
        (x @ w.weight.T).unflatten(-1, (H, -1)) for w in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    low, high = layer.decay_proj
    alpha = torch.sigmoid(x @ low.weight.T @ high.weight.T + high.bias).pow(1 / 16)
    alpha = alpha.unflatten(-1, (H, -1))
    S, rows = 0, []
    for t in range(x.shape[1]):
        S = alpha[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * layer.key_dim**-0.5)
    o = normed(layer, torch.stack(rows, 1)).flatten(-2)
    return (o * silu(x @ layer.g_proj.weight.T)) @ layer.o_proj.weight.T


def retention(layer, x):
    """With channel pairs as complex numbers: k_s turned by s, q_t by t."""
    H, D = layer.num_heads, layer.key_dim
    q, k, v = (
        (x @ w.weight.T).unflatten(-1, (H, -1)) for w in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q, k = (torch.complex(*y.chunk(2, -1)) for y in (q, k))
    theta = layer.rope ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    rows = []
    for t in range(x.shape[1]):
        o = 0
        for s in range(t + 1):
            turn = torch.exp(1j * (t - s) * theta)
            weight = (q[:, t] * turn * k[:, s].conj()).sum(-1).real * gamma ** (t - s) * D**-0.5
            o = o + weight[..., None] * v[:, s]
        rows.append(o)
    o = normed(layer, torch.stack(rows, 1)).flatten(-2)
    return (o * silu(x @ layer.g_proj.weight.T)) @ layer.o_proj.weight.T


def delta_rule(layer, x):
    """DeltaNet, GatedDeltaNet and KimiDeltaAttention; the decay comes before the correction."""
    mixed = torch.cat([x @ w.weight.T for w in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    W, weight = layer.convolution.kernel_size, layer.convolution.weight[:, None]
    mixed = silu(F.conv1d(F.pad(mixed.mT, (W - 1, 0)), weight, groups=mixed.shape[-1]).mT)
    q, k, v = mixed.split(layer.widths, -1)
    each = layer.num_value_heads // layer.num_heads
    q, k = (
        F.normalize(y.unflatten(-1, (layer.num_heads, -1)), dim=-1).repeat_interleave(each, 2)
        for y in (q, k)
    )
    v = v.unflatten(-1, (layer.num_value_heads, -1))
    beta = torch.sigmoid(x @ layer.beta_proj.weight.T) * (2 if layer.negative_eigenvalues else 1)
    alpha, gate = torch.ones_like(beta)[..., None], torch.ones((), dtype=x.dtype)
    if isinstance(layer, GatedDeltaNet):
        dt = F.softplus(x @ layer.decay_proj.weight.T + layer.dt_bias)
        alpha = torch.exp(-layer.A_log.exp() * dt)[..., None]
    if isinstance(layer, KimiDeltaAttention):
        low, high = layer.decay_proj
        dt = (x @ low.weight.T @ high.weight.T).unflatten(-1, (layer.num_heads, -1))
        alpha = torch.exp(-layer.A_log.exp()[:, None] * F.softplus(dt + layer.dt_bias))
        low, high = layer.g_proj
        gate = torch.sigmoid(x @ low.weight.T @ high.weight.T + high.bias)
    elif layer.g_proj is not None:
        gate = silu(x @ layer.g_proj.weight.T)
    S = x.new_zeros(x.shape[0], layer.num_value_heads, layer.key_dim, layer.value_dim)
    rows = []
    for t in range(x.shape[1]):
        S = alpha[:, t, :, :, None] * S
        held = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        written = beta[:, t, :, None] * (v[:, t] - held)
        S = S + k[:, t, :, :, None] * written[:, :, None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * layer.key_dim**-0.5)
    o = normed(layer, torch.stack(rows, 1)).flatten(-2)
    return (o * gate) @ layer.o_proj.weight.T


def hgrn2(layer, x):
    H, lb = layer.num_heads, layer.lower_bound
    q = silu(x @ layer.q_proj.weight.T).unflatten(-1, (H, -1))
    v = (x @ layer.v_proj.weight.T).unflatten(-1, (H, -1))
    f = lb + (1 - lb) * torch.sigmoid(x @ layer.decay_proj.weight.T).unflatten(-1, (H, -1))
    S, rows = 0, []
    for t in range(x.shape[1]):
        S = f[:, t, :, :, None] * S + (1 - f[:, t])[..., None] * v[:, t, :, None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * layer.key_dim**-0.5)
    return normed(layer, torch.stack(rows, 1).flatten(-2)) @ layer.o_proj.weight.T


def mamba2(layer, x):
    H, G, W = layer.num_heads, layer.num_key_heads, layer.convolution.kernel_size
    z, u, dt = (x @ layer.in_proj.weight.T).split([layer.widths[0], sum(layer.widths), H], -1)
    weight, bias = layer.convolution.weight[:, None], layer.convolution.bias
    u = silu(F.conv1d(F.pad(u.mT, (W - 1, 0)), weight, bias, groups=u.shape[-1]).mT)
    v, B, C = u.split(layer.widths, -1)
    v = v.unflatten(-1, (H, -1))
    B, C = (y.unflatten(-1, (G, -1)).repeat_interleave(H // G, 2) for y in (B, C))
    dt = F.softplus(dt + layer.dt_bias)
    alpha, S, rows = torch.exp(-layer.A_log.exp() * dt), 0, []
    for t in range(x.shape[1]):
        write = dt[:, t, :, None] * v[:, t]
        S = alpha[:, t, :, None, None] * S + B[:, t, :, :, None] * write[:, :, None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, C[:, t]) + layer.D[:, None] * v[:, t])
    o = (torch.stack(rows, 1).flatten(-2) * silu(z)).unflatten(-1, (G, -1))
    o = o / (o.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt()
    return (o.flatten(-2) * layer.norm_weight) @ layer.out_proj.weight.T


def lightning(layer, x):
    q, k, v = (
        silu(x @ w.weight.T).unflatten(-1, (layer.num_heads, -1))
        for w in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    decay, S, rows = torch.exp(-layer.slope)[:, None, None], 0, []
    for t in range(x.shape[1]):
        S = decay * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    o = normed(layer, torch.stack(rows, 1).flatten(-2))
    return (o * torch.sigmoid(x @ layer.g_proj.weight.T)) @ layer.o_proj.weight.T


def gated_convolution(layer, x):
    """y_t = (sum_w weight_w x_{t-w} + b) (x_t W + b) + x_t."""
    convolution, projection = layer.convolution, layer.projection
    W = convolution.kernel_size
    rows = []
    for t in range(x.shape[1]):
        y = convolution.bias.expand(x.shape[0], -1)
        for w in range(min(W, t + 1)):
            y = y + convolution.weight[:, W - 1 - w] * x[:, t - w]
        rows.append(y * (x[:, t] @ projection.weight.T + projection.bias) + x[:, t])
    return torch.stack(rows, 1)


FORMS = {
    "convolution": (lambda **o: GatedConvolution(24, kernel_size=4, **o), gated_convolution),
    "lightning": (lambda **o: LightningAttention(24, 3, depth=0.25, **o), lightning),
    "lightning geometric": (
        lambda **o: LightningAttention(24, 4, head_dim=5, slopes="geometric", **o),
        lightning,
    ),
    "hgrn2": (lambda **o: HGRN2(24, 3, **o), hgrn2),
    "hgrn2 bounded": (lambda **o: HGRN2(24, 2, key_dim=5, lower_bound=0.7, **o), hgrn2),
    "mamba2": (lambda **o: Mamba2(24, 4, key_dim=6, value_dim=8, **o), mamba2),
    "mamba2 groups": (
        lambda **o: Mamba2(24, 4, key_dim=5, value_dim=3, num_key_heads=2, kernel_size=2, **o),
        mamba2,
    ),
    "gla": (lambda **o: GatedLinearAttention(24, 3, gate_rank=5, **o), gated_linear_attention),
    "gla sizes": (
        lambda **o: GatedLinearAttention(24, 2, key_dim=7, value_dim=5, **o),
        gated_linear_attention,
    ),
    "retention": (lambda **o: Retention(24, 3, rope=50.0, **o), retention),
    "delta": (lambda **o: DeltaNet(24, 3, **o), delta_rule),
    "delta gate": (
        lambda **o: DeltaNet(
            24, 2, value_dim=5, output_gate=True, negative_eigenvalues=True, kernel_size=3, **o
        ),
        delta_rule,
    ),
    "kimi": (lambda **o: KimiDeltaAttention(24, 3, head_dim=6, **o), delta_rule),
    "gated delta": (lambda **o: GatedDeltaNet(24, 2, key_dim=6, **o), delta_rule),
    "gated delta grouped": (
        lambda **o: GatedDeltaNet(
            24, 2, num_value_heads=4, key_dim=5, value_dim=3, kernel_size=2, **o
        ),
        delta_rule,
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_the_layer_is_its_equations(name, backend):
    """Values and all gradients in float64."""
    build, equations = FORMS[name]
    layer = enlarged(build(backend=backend))
    x = torch.randn(2, 70, 24, dtype=torch.float64, requires_grad=True)
    wanted, found = [x, *layer.parameters()], []
    for y in (layer(x), equations(layer, x)):
        found.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", FORMS)
def test_one_token_at_a_time_and_the_size_of_the_state(name):
    layer = enlarged(FORMS[name][0]())
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    cache, rows = None, []
    with torch.no_grad():
        for t in range(30):
            y, cache = layer(x[:, t : t + 1], cache=cache, return_cache=True)
            rows.append(y)
        torch.testing.assert_close(torch.cat(rows, 1), layer(x), rtol=1e-9, atol=1e-10)
    assert sum(part[0].numel() for part in cache) == layer.state_size()


def test_parameter_counts_of_the_docstrings():
    def count(layer):
        return sum(p.numel() for p in layer.parameters())

    dim, rank = 64, 16
    K, V = dim // 2, dim
    expected = dim * (2 * K + 3 * V) + rank * (dim + K) + K + V // 4
    assert count(GatedLinearAttention(dim, 4)) == expected
    H, Hv, Dk, Dv, W = 2, 4, 8, 16, 4
    K, V = H * Dk, Hv * Dv
    expected = dim * (2 * K + 3 * V + 2 * Hv) + (2 * K + V) * W + 2 * Hv + Dv
    assert count(GatedDeltaNet(dim, H, num_value_heads=Hv, key_dim=Dk)) == expected
    K = V = dim
    expected = dim * (2 * K + 2 * V + H) + (2 * K + V) * W + dim // H
    assert count(DeltaNet(dim, H)) == expected
    assert count(DeltaNet(dim, H, output_gate=True)) == expected + dim * V
    width = H * Dk
    expected = 4 * dim * width + (dim + width) * 2 * Dk + dim * H + 3 * width * W
    assert count(KimiDeltaAttention(dim, H, head_dim=Dk)) == expected + 2 * width + H + Dk
    assert count(LightningAttention(dim, 4)) == 5 * dim**2 + dim
    assert count(Retention(dim, 4)) == 8 * dim**2 + 2 * dim // 4
    assert count(SoftmaxAttention(dim, 4)) == 4 * dim**2
    assert count(HGRN2(dim, 4)) == 4 * dim**2 + dim
    assert count(HGRN2(dim, 4, key_dim=8)) == 2 * dim * 4 * 8 + 2 * dim**2 + dim
    H, N, P, G = 4, 16, 32, 2
    V = H * P
    U = V + 2 * G * N
    expected = dim * (2 * V + U + H) + U * (W + 1) + 3 * H + V
    assert count(Mamba2(dim, H, key_dim=N, value_dim=P, num_key_heads=G)) == expected


def test_gates_begin_in_their_ranges():
    layer = GatedDeltaNet(16, 64, key_dim=2)
    assert (layer.A_log.exp() >= 0.01).all()
    assert (layer.A_log.exp() <= 16).all()
    dt = F.softplus(layer.dt_bias)
    assert (dt >= 0.9e-3).all()
    assert (dt <= 0.11).all()


def test_slopes_of_the_papers():
    assert LightningAttention(32, 4, depth=0.5).slope.tolist() == [0.0, 1.0, 2.0, 3.0]
    layer = LightningAttention(32, 4, slopes="geometric")
    assert layer.slope.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GatedLinearAttention(30, 4), r"dim: got 30; expected a multiple of 2 num_heads"),
        (lambda: GatedLinearAttention(32, 4, gate_rank=0), r"gate_rank: got 0; expected an int"),
        (lambda: GatedLinearAttention(32, 4, key_dim=-1), r"key_dim: got -1; expected an int"),
        (lambda: GatedLinearAttention(32, 4, backend="x"), r"backend: got 'x'"),
        (lambda: GatedDeltaNet(32, 3, num_value_heads=4), r"got 3; expected a divisor"),
        (lambda: GatedDeltaNet(32, 4, num_value_heads=2), r"num_value_heads: got 2; expected a mu"),
        (lambda: GatedDeltaNet(32, 4, kernel_size=9), r"kernel_size: got 9; expected at most 8"),
        (lambda: LightningAttention(32, 4, depth=2), r"depth: got 2; expected a number in"),
        (lambda: LightningAttention(32, 4, slopes="alibi"), r"slopes: got 'alibi'; expected one"),
        (lambda: HGRN2(32, 3), r"dim: got 32; expected a multiple of num_heads = 3"),
        (lambda: HGRN2(32, 4, lower_bound=1.0), r"lower_bound: got 1.0; expected a number in"),
        (lambda: Mamba2(32, 2, num_key_heads=4), r"num_key_heads: got 4; expected a divisor"),
        (lambda: Mamba2(32, 4, key_dim=0), r"key_dim: got 0; expected an int >= 1"),
        (lambda: KimiDeltaAttention(32, 4, head_dim=0), r"head_dim: got 0"),
        (lambda: DeltaNet(32, 3), r"dim: got 32; expected a multiple of num_heads = 3"),
        (lambda: DeltaNet(32, 4, output_gate=1), r"output_gate: got int 1"),
        (lambda: GatedDeltaNet(32, 4, key_dim=1.5), r"key_dim: got float 1.5; expected an int"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()
