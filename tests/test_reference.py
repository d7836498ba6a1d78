"""The definition against what shares no code with it: written-out weights and closed forms."""

import pytest
import torch

from linattn import linear_attention
from linattn.reference.additive import quadratic
from operator_calls import KINDS, any_backend, inputs_of

F64 = torch.float64


@any_backend
@pytest.mark.parametrize("kind", [k for k, options in KINDS.items() if not options.get("delta")])
@pytest.mark.parametrize("reset", [False, True])
def test_additive_kinds_equal_the_quadratic_form(backend, kind, reset):
    """Case D12 for the normalised ones; outputs and gradients, hard resets included."""
    inputs = inputs_of(kind, N=37, reset=reset)
    x = {n: t.requires_grad_() for n, t in inputs.tensors.items()}
    weights = {"scale": 0.4, **inputs.options}
    o = linear_attention(**x, **weights, backend=backend)
    per_token = dict(x)
    if "log_decay" in x and x["log_decay"].dim() == 1:
        per_token["log_decay"] = x["log_decay"].expand(x["q"].shape[:3])
    expected = quadratic(**per_token, **weights)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-11)
    upstream = torch.randn_like(o)
    found = torch.autograd.grad(o, list(x.values()), upstream)
    # exp(-inf) summed over a span has no gradient that autograd could find there.
    if not reset or "log_decay" not in x:
        wanted = torch.autograd.grad(expected, list(x.values()), upstream)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@any_backend
def test_the_delta_rule_decays_first_then_erases_then_writes(backend):
    """Case E9, with numbers small enough to do by hand."""
    k = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=F64).view(1, 2, 1, 2)
    v = torch.tensor([[2.0], [3.0]], dtype=F64).view(1, 2, 1, 1)
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F64).view(1, 2, 1, 2)
    beta = torch.tensor([1.0, 0.5], dtype=F64).view(1, 2, 1)
    alpha = torch.tensor([[1.0, 1.0], [0.5, 0.25]], dtype=F64).view(1, 2, 1, 2)
    o, S = linear_attention(
        q, k, v, alpha.log(), beta, scale=1.0, return_state=True, backend=backend
    )
    # S_1 = (2, 0). Decayed: (1, 0). Recalled by k_2: 0.6. Written: 0.5 * (3 - 0.6) = 1.2.
    expected = torch.tensor([1.0 + 0.6 * 1.2, 0.8 * 1.2], dtype=F64)
    torch.testing.assert_close(S.flatten(), expected)
    torch.testing.assert_close(o.flatten(), torch.tensor([2.0, 0.96], dtype=F64))
    # Erasing before decaying: recalled 1.2, left (1.64, -0.48), decayed (0.82, -0.12), written.
    other = torch.tensor([0.82 + 0.6 * 1.5, -0.12 + 0.8 * 1.5], dtype=F64)
    assert not torch.allclose(S.flatten(), other)


@any_backend
def test_the_delta_rule_replaces_what_an_orthonormal_key_holds(backend):
    """beta = 1: reading a key back gives the last value that was written to it."""
    D = 8
    where = torch.randint(0, D, (1, 100, 1))
    k = torch.nn.functional.one_hot(where, D).to(F64)
    v = torch.randn(1, 100, 1, 5, dtype=F64)
    beta = torch.ones(1, 100, 1, dtype=F64)
    o, S = linear_attention(k, k, v, None, beta, scale=1.0, return_state=True, backend=backend)
    torch.testing.assert_close(o, v)
    for key in range(D):
        last = int((where[0, :, 0] == key).nonzero().max())
        torch.testing.assert_close(S[0, 0, key], v[0, last, 0])


@any_backend
@pytest.mark.parametrize(
    ("decay", "causal"), [(None, True), ("head", True), ("token", True), (None, False)]
)
def test_affine_weights_sum_to_one(backend, decay, causal):
    """Values of one give ones; the first causal row is v_1; bfloat16 sums do not drift (E1)."""
    inputs = inputs_of("affine", N=300, decay=decay, causal=causal)
    inputs.options["backend"] = backend
    o = linear_attention(**inputs.tensors, **inputs.options)
    if causal:
        torch.testing.assert_close(o[:, 0], inputs.tensors["v"][:, 0])
    ones = torch.ones_like(inputs.tensors["v"])
    for dtype in (F64, torch.bfloat16):
        x = {n: t.to(dtype) for n, t in {**inputs.tensors, "v": ones}.items()}
        o = linear_attention(**x, **inputs.options)
        assert o.dtype == dtype
        units = 32 if dtype == F64 else 1  # the sums of bfloat16 inputs are float32
        assert float((o - 1).abs().max()) <= units * torch.finfo(dtype).eps


@any_backend
def test_metala_holds_every_probability_row(backend):
    """MetaLA's constructive check, for all rows at once and two channels of the decay.

    alpha_t = P_{t-1} / P_t, k = 1 - alpha, q = 1: o_t = sum_{s <= t} p_s v_s / P_t.
    """
    N = 150
    p = torch.rand(1, N, 2, 1, dtype=F64).softmax(1)
    total = p.cumsum(1)
    alpha = torch.cat([torch.zeros_like(p[:, :1]), total[:, :-1]], 1) / total
    v = torch.randn(1, N, 2, 3, dtype=F64)
    o = linear_attention(torch.ones_like(p), 1 - alpha, v, alpha.log(), scale=1.0, backend=backend)
    torch.testing.assert_close(o, (p * v).cumsum(1) / total)
    torch.testing.assert_close(o[:, -1], (p * v).sum(1))


@any_backend
def test_k_is_one_minus_alpha_keeps_a_mean(backend):
    """With k = 1 - alpha the weights of a row sum to 1 minus the product of its alphas."""
    g = -torch.rand(2, 90, 3, 4, dtype=F64)
    q = torch.nn.functional.one_hot(torch.randint(0, 4, (2, 90, 3)), 4).to(F64)
    ones = torch.ones(2, 90, 3, 1, dtype=F64)
    o = linear_attention(q, 1 - g.exp(), ones, g, scale=1.0, backend=backend)
    torch.testing.assert_close(o[..., 0], 1 - (q * g.cumsum(1).exp()).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [False, True])
def test_second_derivatives_of_the_reference(kind, state):
    """Case E4: to any order, against numerical ones."""
    inputs = inputs_of(kind, N=3, Dk=2, Dv=2, B=1, heads=(1, 1, 1), state=state)
    names = list(inputs.tensors)
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]

    def call(*tensors):
        x = dict(zip(names, tensors, strict=True))
        return linear_attention(**x, **inputs.options, return_state=True, backend="reference")

    # The fast mode compares with random vectors: enough for autograd's own derivatives.
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_reference(kind):
    inputs = inputs_of(kind, N=4, Dk=3, Dv=2, B=1, heads=(2, 1, 2), state=True, mask=True)
    names = list(inputs.tensors)
    leaves = [x.requires_grad_() for x in inputs.tensors.values()]

    def call(*tensors):
        x = dict(zip(names, tensors, strict=True))
        return linear_attention(**x, **inputs.options, return_state=True, backend="reference")

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_no_autocast_inside_the_reference():
    """Design 5: under autocast q, k and v are rounded, the sums are not."""
    inputs = inputs_of("token", N=50, state=True, dtype=torch.float32)
    rounded = {n: x.bfloat16() if n in "qkv" else x for n, x in inputs.tensors.items()}
    expected, state = linear_attention(**rounded, return_state=True, backend="reference")
    with torch.autocast("cpu", torch.bfloat16):
        o, S = inputs.call("reference")
    assert torch.equal(o, expected)
    assert torch.equal(S, state)
