"""Values and tensors that are unusual and right: every backend takes them as `reference` does."""

import pytest
import torch

from linattn import backends, causal_conv1d, linear_attention
from linattn.testing import relative_error
from operator_calls import FAST, TRITON_DEVICE

BACKENDS = [*FAST, *(name for name in ["triton"] if backends()[name].available)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def device_of(backend):
    return TRITON_DEVICE if backend == "triton" else "cpu"


@every_backend
@pytest.mark.parametrize("N", [1, 20])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_a_gate_of_nan_is_not_taken_for_a_reset(backend, N, channels, delta):
    """Case: the maximum of NaN and -800 is -800 on a GPU; a network that diverged looked well."""
    x = torch.randn(1, N, 2, 8, device=device_of(backend))
    g = torch.zeros((1, N, 2, 8) if channels else (1, N, 2), device=x.device)
    g[0, N // 2, 0] = torch.nan
    beta = torch.rand(1, N, 2, device=x.device) if delta else None
    S = torch.randn(1, 2, 8, 8, device=x.device)
    o, state = linear_attention(
        x, x, x, g, beta, initial_state=S, return_state=True, backend=backend
    )
    assert o[:, N // 2 :, 0].isnan().all()
    assert state[:, 0].isnan().all()
    assert o[:, :, 1].isfinite().all()
    assert state[:, 1].isfinite().all()


def negated(x):
    """Return x as a tensor whose sign is still to be turned."""
    turned = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert turned.is_neg()
    return turned


@every_backend
@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "beta", "initial_state"])
def test_a_sign_that_is_still_to_be_turned(backend, N, name):
    """Case: a kernel that was launched past the dispatcher read the other sign."""
    shape, device = (1, N, 2, 8), device_of(backend)
    x = {n: torch.randn(shape, device=device) for n in "qkv"}
    x["log_decay"] = -torch.rand(1, N, 2, device=device)
    x["beta"] = torch.rand(1, N, 2, device=device)
    x["initial_state"] = torch.randn(1, 2, 8, 8, device=device)
    expected = linear_attention(**x, return_state=True, backend=backend)
    x[name] = negated(x[name])
    found = linear_attention(**x, return_state=True, backend=backend)
    torch.testing.assert_close(found, expected)
    if name == "initial_state":
        o, state = linear_attention(**x, out_state=x[name], return_state=True, backend=backend)
        torch.testing.assert_close((o, state), expected)
        torch.testing.assert_close(x[name].resolve_neg(), expected[1])


@every_backend
def test_a_sign_that_is_still_to_be_turned_in_a_convolution(backend):
    x = torch.randn(1, 5, 4, device=device_of(backend))
    weight = torch.randn(4, 3, device=x.device)
    expected = causal_conv1d(x, weight, backend=backend)
    torch.testing.assert_close(causal_conv1d(negated(x), weight, backend=backend), expected)
    torch.testing.assert_close(causal_conv1d(x, negated(weight), backend=backend), expected)


@every_backend
@pytest.mark.parametrize("default", DTYPES)
def test_another_default_dtype_changes_nothing(backend, default):
    """Case: a constant made in the default dtype rounded the bias and the sums of the weights."""
    x = torch.rand(1, 70, 2, 8, device=device_of(backend))
    g = -torch.rand(1, 70, 2, device=x.device)

    def call():
        q, k, v, gate = (y.clone().requires_grad_() for y in (x, x, x, g))
        o, state = linear_attention(
            q, k, v, gate, scale=0.3, bias=0.1, normalize=True, return_state=True, backend=backend
        )
        return (o, state, *torch.autograd.grad((o * x).sum() + state.sum(), (q, k, v, gate)))

    expected, before = call(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = call()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def float16_errors(backend, q, k, v, grad_o, **options):
    """Return the errors of o and all gradients against the token loop in float64."""
    given = [x.half().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in given]
    o = linear_attention(*given, **options, backend=backend)
    expected = linear_attention(*exact, **options, backend="reference")
    found = (o.detach(), *torch.autograd.grad(o, given, grad_o.half()))
    expected = (expected.detach(), *torch.autograd.grad(expected, exact, grad_o.half().double()))
    return [relative_error(a.double(), b) for a, b in zip(found, expected, strict=True)]


@every_backend
def test_float16_has_states_and_weights_beyond_its_range(backend):
    """Case: a state or a sum of weights above 65504 became infinite on its way into a product."""
    ones = torch.ones(1, 200, 1, 16, device=device_of(backend))
    large = float16_errors(backend, 0.02 * ones, 30 * ones, 30 * ones, ones, normalize=True)
    assert max(large[:1] + large[3:]) < 3e-3  # of q and k nothing is left: all weights are alike
    short = ones[:, :20].expand(1, 20, 1, 16)
    errors = float16_errors(
        backend, 90 * short, 90 * short, 0.01 * short, short, normalize=True, scale=1.0
    )
    assert max(errors[:1] + errors[3:]) < 3e-3


@every_backend
def test_float16_has_gradients_below_its_range(backend):
    """Case: gradients over the sum of the weights were rounded to 0 before they were used."""
    q, k = (20 * torch.rand(1, 200, 1, 16, device=device_of(backend)) for _ in "qk")
    v = torch.randn_like(q)
    grad_o = 1e-2 * torch.randn_like(q)
    errors = float16_errors(backend, q, k, v, grad_o, normalize=True, scale=1.0)
    assert max(errors) < 9e-3


@every_backend
@pytest.mark.parametrize("far", ["head", "channel of one token"])
def test_strides_beyond_32_bits(backend, far):
    """Case: a head times its stride was counted in 32 bits, and read out of bounds."""
    step = 2**30 + 8
    memory = torch.empty(3 * step, dtype=torch.bfloat16, device=device_of(backend))  # not touched
    if far == "head":
        x = torch.randn(1, 5, 3, 4, device=memory.device).bfloat16()
        q = memory.as_strided(x.shape, (0, 4, step, 1))
    else:
        x = torch.randn(1, 1, 2, 4, device=memory.device).bfloat16()
        q = memory.as_strided(x.shape, (0, 0, 8, step * 3 // 4))
    q.copy_(x)
    expected = linear_attention(x, x, x, backend=backend)
    assert torch.equal(linear_attention(q, x, x, backend=backend), expected)
    assert torch.equal(linear_attention(x, q, x, backend=backend), expected)
    assert torch.equal(linear_attention(x, x, q, backend=backend), expected)
