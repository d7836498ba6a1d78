"""Cuts, batch rows, causality and masks: what must hold whatever the numbers are."""

import pytest
import torch

from linattn import linear_attention
from linattn.reference.additive import quadratic
from linattn.testing import Case, make_inputs
from test_against_reference import FAST, KINDS, fast, kinds

CAUSAL = [k for k, o in KINDS.items() if o.get("causal", True)]
causal_kinds = pytest.mark.parametrize("kind", CAUSAL)


def per_token(x):
    return x.dim() >= 3


@fast
@causal_kinds
@pytest.mark.parametrize("cut", [(1, 99), (37, 63), (64, 36), (0, 100), (97, 1, 1, 1)])
def test_any_cut_equals_the_whole(backend, kind, cut):
    """Outputs, final state and gradients (D11: backward through time over segments)."""
    inputs = make_inputs(Case(N=100, state=True, **KINDS[kind]))
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    o, state = inputs.call(backend)
    grads = torch.autograd.grad(o.square().sum() + state.sum(), list(leaves.values()))
    S, outputs, start = leaves["initial_state"], [], 0
    for n in cut:
        piece = {
            name: x[:, start : start + n] if per_token(x) else x
            for name, x in leaves.items()
            if name != "initial_state"
        }
        part, S = linear_attention(
            **piece, **inputs.options, initial_state=S, return_state=True, backend=backend
        )
        outputs.append(part)
        start += n
    whole = torch.cat(outputs, 1)
    torch.testing.assert_close(whole, o, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(S, state, rtol=1e-9, atol=1e-10)
    again = torch.autograd.grad(whole.square().sum() + S.sum(), list(leaves.values()))
    for a, b in zip(again, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@fast
@causal_kinds
def test_out_state_in_place(backend, kind):
    inputs = make_inputs(Case(N=1, state=True, **KINDS[kind]))
    for N in (1, 20):
        inputs = make_inputs(Case(N=N, state=True, **KINDS[kind]))
        before = inputs.tensors["initial_state"].clone()
        o, state = inputs.call(backend)
        assert torch.equal(inputs.tensors["initial_state"], before)
        out = torch.empty_like(state)
        o2, state2 = linear_attention(
            **inputs.tensors, **inputs.options, out_state=out, return_state=True, backend=backend
        )
        assert state2 is out
        assert torch.equal(inputs.tensors["initial_state"], before)
        torch.testing.assert_close((o2, out), (o, state))
        inputs.options["out_state"] = inputs.tensors["initial_state"]
        o3 = linear_attention(**inputs.tensors, **inputs.options, backend=backend)
        torch.testing.assert_close((o3, inputs.tensors["initial_state"]), (o, state))


@fast
@kinds
def test_batch_rows_are_independent_bit_for_bit(backend, kind):
    inputs = make_inputs(Case(N=100, B=3, dtype=torch.float32, **KINDS[kind]))
    o, state = inputs.call(backend)
    for x in inputs.tensors.values():
        if per_token(x):
            x[1:] = -torch.rand_like(x[1:])
    o2, state2 = inputs.call(backend)
    assert torch.equal(o[0], o2[0])
    assert torch.equal(state[0], state2[0])
    assert not torch.equal(o[1], o2[1])


@fast
@causal_kinds
@pytest.mark.parametrize("later", [-0.5, -30.0, -float("inf")])
def test_later_tokens_do_not_move_a_bit_of_the_past(backend, kind, later):
    def early(change):
        inputs = make_inputs(Case(N=150, dtype=torch.float32, **KINDS[kind]))
        for name, x in inputs.tensors.items():
            if change and per_token(x):
                x[:, 75:] = later if name == "log_decay" else x[:, 75:] * 0.5 + 0.1
        leaves = [x.requires_grad_() for x in inputs.tensors.values()]
        o = inputs.call(backend)[0][:, :75]
        grads = torch.autograd.grad(o.square().sum(), leaves)
        return o, *(g[:, :75] if per_token(g) else g for g in grads)

    assert all(torch.equal(a, b) for a, b in zip(early(False), early(True), strict=True))


@fast
@kinds
@pytest.mark.parametrize("fill", [0.0, 7.0, float("nan"), float("inf")])
def test_masked_values_change_no_bit(backend, kind, fill):
    results = []
    for value in (fill, -1.0):
        inputs = make_inputs(Case(N=90, mask=True, dtype=torch.float32, **KINDS[kind]))
        mask = inputs.options["mask"]
        for x in inputs.tensors.values():
            if per_token(x):
                x[~mask] = value
        leaves = [x.requires_grad_() for x in inputs.tensors.values()]
        o, state = inputs.call(backend)
        grads = torch.autograd.grad(o.square().sum() + state.sum(), leaves)
        assert o[~mask].eq(0).all()
        assert all(g[~mask].eq(0).all() for g in grads if per_token(g))
        results.append((o, state, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@fast
@pytest.mark.parametrize("decay", [None, "token", "channel"])
@pytest.mark.parametrize("causal", [True, False])
def test_against_the_quadratic_form(backend, decay, causal):
    """An oracle that shares no code with any recurrence; resets included."""
    if decay and not causal:
        return
    x = make_inputs(Case(N=40, decay=decay, reset=True)).tensors
    expected = quadratic(**x, scale=0.7, causal=causal)
    torch.testing.assert_close(
        linear_attention(**x, scale=0.7, causal=causal, backend=backend), expected
    )
    if decay != "channel":
        affine = {"scale": 0.1, "bias": 2.0, "normalize": True, "causal": causal}
        expected = quadratic(**x, **affine)
        torch.testing.assert_close(linear_attention(**x, **affine, backend=backend), expected)


@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_affine_weights_sum_to_one_and_the_first_row_is_its_value(backend):
    """Case D12: one normaliser a head, summed over time."""
    x = make_inputs(Case(N=100, heads=(3, 3, 3), bias=1.0, normalize=True)).tensors
    options = {"scale": 1.0, "bias": 1.5, "normalize": True, "backend": backend}
    o = linear_attention(**x, **options)
    torch.testing.assert_close(o[:, 0], x["v"][:, 0])
    ones = linear_attention(x["q"], x["k"], torch.ones_like(x["v"]), **options)
    torch.testing.assert_close(ones, torch.ones_like(ones))


@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_metala_reproduces_any_row_of_attention(backend):
    """MetaLA's constructive check: alpha_t = P_{t-1} / P_t, k = 1 - alpha, q = 1."""
    p = torch.rand(100, dtype=torch.float64).softmax(0)
    total = p.cumsum(0)
    alpha = torch.cat([torch.zeros(1, dtype=torch.float64), total[:-1]]) / total
    v = torch.randn(1, 100, 1, 4, dtype=torch.float64)
    k = (1 - alpha).view(1, 100, 1, 1)
    o = linear_attention(
        torch.ones_like(k), k, v, alpha.log().view(1, 100, 1, 1), scale=1.0, backend=backend
    )
    torch.testing.assert_close(o[0, -1, 0], p @ v[0, :, 0])
