"""MetaLA against its equations, token by token and in the parallel form, and what they promise."""

import pytest
import torch
from torch.nn import functional as F

from linattn.layers import ConvolutionCache, MetaLA, RecurrentCache

OPTIONS = {
    "released": {},
    "linear": {"augmentation": "linear"},
    "none": {"augmentation": None},
    "no convolution": {"kernel_size": None},
    "key": {"key": True},
    "two taps": {"kernel_size": 2},
}
options = pytest.mark.parametrize("name", OPTIONS)


def make(name, dim=24, num_heads=3, **more):
    torch.manual_seed(0)
    layer = MetaLA(dim, num_heads, **OPTIONS[name], **more).double()
    with torch.no_grad():  # large, so that every part is felt
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.dim() > 1 else 0.3))
    return layer


def prepared(layer, x):
    """q, k, alpha [B, N, H, Dk], v [B, N, H, Dv] and the gate of one row, by the equations."""
    u = x
    if layer.convolution is not None:
        W = layer.convolution.kernel_size
        weight = layer.convolution.weight[:, None]
        u = F.conv1d(F.pad(x.mT, (W - 1, 0)), weight, groups=layer.dim).mT
        u = u * torch.sigmoid(u)
    H = layer.num_heads
    q = (u @ layer.q_proj.weight.T).unflatten(-1, (H, -1))
    v = (u @ layer.v_proj.weight.T).unflatten(-1, (H, -1))
    alpha = torch.sigmoid(u @ layer.decay_proj.weight.T).pow(1 / 16).unflatten(-1, (H, -1))
    k = 1 - alpha if layer.k_proj is None else (u @ layer.k_proj.weight.T).unflatten(-1, (H, -1))
    g = u @ layer.g_proj.weight.T + layer.g_proj.bias
    return q, k, v, alpha, g * torch.sigmoid(g)


def finished(layer, o, q, v, alpha, gate):
    """Self-augmentation, the norm over a head, the gate and Wo."""
    if layer.augmentation is not None:
        s = torch.einsum("bnhd,hd,bnhd->bnh", q, layer.augmentation_weight, 1 - alpha)
        extra = s[..., None] * v
        o = o + (torch.sigmoid(extra) if layer.augmentation == "sigmoid" else extra)
    mean, var = o.mean(-1, keepdim=True), o.var(-1, keepdim=True, unbiased=False)
    o = (o - mean) / (var + 1e-5).sqrt()
    return (gate * o.flatten(-2)) @ layer.o_proj.weight.T


def recurrent(layer, x):
    q, k, v, alpha, gate = prepared(layer, x)
    S = x.new_zeros(x.shape[0], layer.num_heads, layer.key_dim, layer.value_dim)
    rows = []
    for t in range(x.shape[1]):
        S = alpha[:, t, :, :, None] * S + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * layer.key_dim**-0.5)
    return finished(layer, torch.stack(rows, 1), q, v, alpha, gate)


def parallel(layer, x):
    """map(t, s) = sum_d q_td k_sd prod_{j = s+1..t} alpha_jd, then map v."""
    q, k, v, alpha, gate = prepared(layer, x)
    L = alpha.log().cumsum(1)
    decays = torch.exp((L[:, :, None] - L[:, None]).clamp(max=0))  # [B, t, s, H, Dk]
    weights = torch.einsum("bthd,bshd,btshd->bhts", q, k, decays).tril() * layer.key_dim**-0.5
    o = torch.einsum("bhts,bshv->bthv", weights, v)
    return finished(layer, o, q, v, alpha, gate)


@options
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_the_layer_is_its_equations(name, backend):
    """Parallel = recurrent = the operator, values and all gradients, in float64."""
    layer = make(name, backend=backend)
    x = torch.randn(2, 70, 24, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    found = {}
    for form in (layer, lambda x: recurrent(layer, x), lambda x: parallel(layer, x)):
        y = form(x)
        found[form] = [y, *torch.autograd.grad(y.square().sum(), wanted)]
    first, *others = found.values()
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@options
def test_one_token_at_a_time_is_the_whole(name):
    layer = make(name)
    x = torch.randn(2, 40, 24, dtype=torch.float64)
    whole = recurrent(layer, x)
    cache, rows = None, []
    with torch.no_grad():
        for t in range(40):
            y, cache = layer(x[:, t : t + 1], cache=cache, return_cache=True)
            rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-9, atol=1e-10)
    kind = RecurrentCache if layer.convolution is None else ConvolutionCache
    assert type(cache) is kind
    assert sum(t[0].numel() for t in cache) == layer.state_size()
    picked = cache.select(torch.tensor([1, 1, 0]))
    assert all(torch.equal(a, b[[1, 1, 0]]) for a, b in zip(picked, cache, strict=True))


def test_parameters_are_four_squares_and_a_little():
    dim, heads, W = 64, 4, 4
    count = sum(p.numel() for p in MetaLA(dim, heads).parameters())
    assert count == 4 * dim**2 + dim * (W + 1) + dim // 2
    count = sum(p.numel() for p in MetaLA(dim, heads, key=True, augmentation=None).parameters())
    assert count == 4 * dim**2 + dim**2 // 2 + dim * (W + 1)


def test_at_first_the_self_augmentation_is_not_felt():
    """w_aug = 0 adds one half to every channel, which the norm over the head takes away."""
    layer = MetaLA(32, 2)
    x = torch.randn(1, 50, 32) * 100  # the norm's eps is not felt either
    y = layer(x)
    layer.augmentation_weight = None
    torch.testing.assert_close(layer(x), y, rtol=1e-3, atol=1e-4)


def test_the_weights_of_what_is_kept_sum_to_what_was_let_go():
    """sum_s k_s prod_{j > s} alpha_j = 1 - prod alpha: the state of constant values 1."""
    layer = make("none")
    _, k, _, alpha, _ = prepared(layer, torch.randn(1, 30, 24, dtype=torch.float64))
    decays = torch.exp(alpha.log().flip(1).cumsum(1).flip(1) - alpha.log())
    torch.testing.assert_close((k * decays).sum(1), 1 - alpha.prod(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 30, "num_heads": 4}, r"dim: got 30; expected a multiple of 2 num_heads = 8"),
        ({"kernel_size": 9}, r"kernel_size: got 9; expected at most 8"),
        ({"kernel_size": 0}, r"kernel_size: got 0; expected an int >= 1"),
        ({"augmentation": "softmax"}, r"augmentation: got 'softmax'; expected one of"),
        ({"num_heads": 0}, r"num_heads: got 0"),
        ({"key": 1}, r"key: got int 1; expected True or False"),
        ({"backend": "cuda"}, r"backend: got 'cuda'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MetaLA(**{"dim": 32, "num_heads": 4, **arguments})


def test_a_cache_of_another_layer_is_refused():
    _, cache = MetaLA(32, 4, kernel_size=None)(torch.randn(1, 3, 32), return_cache=True)
    with pytest.raises(TypeError, match="cache: got RecurrentCache; expected a ConvolutionCache"):
        MetaLA(32, 4)(torch.randn(1, 1, 32), cache=cache)
