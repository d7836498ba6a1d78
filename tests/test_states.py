"""The state: carried over any cut of a sequence, written in place, changed by nobody else."""

from itertools import pairwise

import pytest
import torch

from linattn import linear_attention
from linattn.testing import Case, make_inputs, relative_error
from operator_calls import (
    CAUSAL,
    KINDS,
    any_backend,
    bit_equal,
    causal_kinds,
    fast,
    has_tokens,
    inputs_of,
    kinds,
    leaves_of,
    pick,
)

# --- what is stored -------------------------------------------------------------------------------


@fast
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [100, 600])  # the longer one is cut into parts
def test_states_of_sixteen_bit_inputs_have_the_digits_of_float32(backend, kind, dtype, N):
    """Of 16 bits are q, k, v and o alone: a decayed key on its way into the state is not."""
    inputs = inputs_of(kind, N=N, B=1, heads=(1, 1, 1), Dk=64, Dv=64, dtype=dtype, mask=True)
    exact = {n: x if x.dtype == torch.bool else x.double() for n, x in inputs.tensors.items()}
    _, expected = linear_attention(**exact, **inputs.options, return_state=True)
    _, state = inputs.call(backend)
    assert state.dtype == torch.float32
    assert relative_error(state.double(), expected) < 1e-5


# --- cuts of a sequence ---------------------------------------------------------------------------


def in_pieces(inputs, cuts, N, backend):
    outputs, state = [], inputs.tensors.get("initial_state")
    for start, stop in pairwise([0, *cuts, N]):
        part = pick(inputs, slice(start, stop))
        part.tensors["initial_state"] = state
        o, state = part.call(backend)
        outputs.append(o)
    return torch.cat(outputs, 1), state


@fast
@causal_kinds
@pytest.mark.parametrize(
    ("N", "cuts"),
    [
        (70, (1,)),
        (70, (69,)),
        (130, (37,)),
        (130, (64, 65, 128)),
        (9, tuple(range(1, 9))),  # every token a step of its own
        (70, (3, 4, 5)),  # a prompt, two steps, then many tokens on a filled state
        (20, (0, 20)),  # pieces without a token
    ],
)
@pytest.mark.parametrize("mask", [False, True])
def test_any_cut_equals_the_whole(backend, kind, N, cuts, mask):
    """Outputs, final state and the gradients through the carried state (D5, D11: TBPTT)."""
    inputs = inputs_of(kind, N=N, state=True, mask=mask)
    whole, parts = leaves_of(inputs), leaves_of(inputs)
    a = whole.call(backend)
    b = in_pieces(parts, cuts, N, backend)
    weights = [torch.randn_like(x) for x in a]
    for results in (a, b):
        torch.autograd.backward(results, weights)
    for x, y in zip(a, b, strict=True):
        assert relative_error(y.detach(), x.detach()) < 1e-12
    for name, x in whole.tensors.items():
        assert relative_error(parts.tensors[name].grad, x.grad) < 1e-11, name


@fast
@causal_kinds
def test_backward_by_hand_over_two_segments(backend, kind):
    """Case D11: the gradient of the state, carried by the caller from one graph to the other."""
    inputs = inputs_of(kind, N=100, state=True)
    whole = leaves_of(inputs)
    o, state = whole.call(backend)
    (o.square().sum() + state.square().sum()).backward()

    first = leaves_of(pick(inputs, slice(0, 41)))
    o1, middle = first.call(backend)
    second = pick(inputs, slice(41, 100))
    second.tensors["initial_state"] = middle
    second = leaves_of(second)
    o2, last = second.call(backend)
    (o2.square().sum() + last.square().sum()).backward()
    carried = second.tensors["initial_state"].grad
    torch.autograd.backward([o1.square().sum(), middle], [None, carried])

    for name, x in whole.tensors.items():
        got, later = first.tensors[name].grad, second.tensors[name].grad
        if has_tokens(name, x):
            got = torch.cat([got, later], 1)
        elif name == "log_decay":  # one a head: both segments have a share
            got = got + later
        assert relative_error(got, x.grad) < 1e-11, name


@fast
@pytest.mark.parametrize("kind", [n for n in KINDS if n not in CAUSAL])
def test_the_state_of_the_form_without_causality_is_the_sum(backend, kind):
    """A second call that starts from the state of the first has seen all tokens."""
    inputs = inputs_of(kind, N=90, state=True)
    o, state = inputs.call(backend)
    _, middle = pick(inputs, slice(0, 50)).call(backend)
    rest = pick(inputs, slice(50, 90))
    rest.tensors["initial_state"] = middle
    o2, state2 = rest.call(backend)
    assert relative_error(o2, o[:, 50:]) < 1e-12
    assert relative_error(state2, state) < 1e-12


# --- the state: who may change it -----------------------------------------------------------------


@any_backend
@kinds
@pytest.mark.parametrize("N", [0, 1, 30])
@pytest.mark.parametrize("mask", [False, True])
def test_out_state_equals_the_returned_state(backend, kind, N, mask):
    """In another tensor, in initial_state itself, and in a tensor that is not contiguous."""
    inputs = inputs_of(kind, N=N, state=True, mask=mask, dtype=torch.float32)
    call = {**inputs.options, "return_state": True, "backend": backend}
    before = inputs.tensors["initial_state"].clone()
    o, state = linear_attention(**inputs.tensors, **call)
    assert torch.equal(inputs.tensors["initial_state"], before)
    assert state.data_ptr() != inputs.tensors["initial_state"].data_ptr() or not state.numel()

    for out in (torch.full_like(state, torch.nan), torch.full_like(state.mT, torch.nan).mT):
        o2, returned = linear_attention(**inputs.tensors, **call, out_state=out)
        assert returned is out
        assert torch.equal(inputs.tensors["initial_state"], before)
        assert relative_error(out, state) < 1e-6
        assert relative_error(o2, o) < 1e-6

    same = inputs.tensors["initial_state"].clone()
    tensors = {**inputs.tensors, "initial_state": same}
    o3 = linear_attention(**tensors, **{**call, "return_state": False}, out_state=same)
    assert relative_error(same, state) < 1e-6
    assert relative_error(o3, o) < 1e-6

    fresh = torch.full_like(state, torch.nan)  # no initial state: what was in it does not matter
    del tensors["initial_state"]
    _, from_zero = linear_attention(**tensors, **call)
    linear_attention(**tensors, **call, out_state=fresh)
    assert relative_error(fresh, from_zero) < 1e-6


@any_backend
@causal_kinds
def test_decoding_in_place_token_by_token_equals_the_whole(backend, kind):
    """Case D12: the normaliser is in the state too."""
    N, prompt = 20, 12
    inputs = inputs_of(kind, N=N, dtype=torch.float32)
    o, last = inputs.call(backend)
    first, state = pick(inputs, slice(0, prompt)).call(backend)
    outputs = [first]
    for t in range(prompt, N):
        step = pick(inputs, slice(t, t + 1))
        step.tensors["initial_state"] = step.options["out_state"] = state
        outputs.append(step.call(backend)[0])
    assert relative_error(torch.cat(outputs, 1), o) < 2e-6
    assert relative_error(state, last) < 2e-6


@any_backend
@pytest.mark.parametrize("N", [1, 70])
def test_out_state_is_refused_while_gradients_are_recorded(backend, N):
    inputs = inputs_of("token", N=N, state=True)
    state = inputs.tensors["initial_state"]
    for name in inputs.tensors:
        tensors = {n: x.detach().requires_grad_(n == name) for n, x in inputs.tensors.items()}
        with pytest.raises(ValueError, match=r"out_state.*require grad.*no_grad"):
            linear_attention(**tensors, out_state=torch.zeros_like(state), backend=backend)
        with torch.no_grad():
            out = torch.zeros_like(state)
            linear_attention(**tensors, out_state=out, backend=backend)
        assert out.any()


@any_backend
@kinds
@pytest.mark.parametrize("N", [0, 1, 30])
def test_inputs_are_never_changed(backend, kind, N):
    """Cases D13 and D21; not in backward either, and not the upstream gradients."""
    inputs = inputs_of(kind, N=N, state=True, mask=True)
    leaves = leaves_of(inputs)
    mask = inputs.options["mask"].clone()
    o, state = leaves.call(backend)
    grads = [torch.randn_like(o), torch.randn_like(state)]
    kept = [g.clone() for g in grads]
    torch.autograd.grad([o, state], list(leaves.tensors.values()), grads, allow_unused=True)
    assert bit_equal(leaves.tensors.values(), inputs.tensors.values())
    assert bit_equal(grads, kept)
    assert torch.equal(mask, inputs.options["mask"])


@fast
@pytest.mark.parametrize("N", [1, 70])
def test_a_second_optimiser_step_on_carried_states(backend, N):
    """Case D13: no in-place error from the second batch on."""
    weight = torch.nn.Parameter(0.1 * torch.randn(8, 8))
    optimiser = torch.optim.SGD([weight], lr=1e-3)
    state = None
    for _ in range(3):
        x = torch.randn(2, N, 3, 8) @ weight
        o, state = linear_attention(
            x, x, x, initial_state=state, return_state=True, backend=backend
        )
        optimiser.zero_grad()
        (o.square().mean() + state.square().mean()).backward()
        optimiser.step()
        state = state.detach()
    assert torch.isfinite(weight).all()


@any_backend
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("decay", [None, "token"])
def test_a_key_or_value_inside_the_state(backend, name, decay):
    """Case: the step wrote the state in place while k or v, a view of it, was still to be read."""
    inputs = make_inputs(Case(N=1, heads=(4, 4, 4), Dk=8, Dv=8, state=True, decay=decay))
    state = inputs.tensors["initial_state"].clone()
    inside = {"k": state[:, None, :, :, 0], "v": state[:, None, :, 0]}[name]
    separate = {**inputs.tensors, name: inside.clone()}
    o, expected = linear_attention(**separate, return_state=True, backend="reference")
    torch._dynamo.reset()
    for run in (linear_attention, torch.compile(linear_attention, fullgraph=True, backend="eager")):
        given = {**inputs.tensors, name: inside, "initial_state": state}
        before = state.clone()
        o2, found = run(**given, out_state=state, return_state=True, backend=backend)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(o2, o)
        state.copy_(before)


@pytest.mark.parametrize("strides", [(4, 4, 1, 1), (4, 4, 0, 1), (2, 4, 2, 1), (4, 2, 2, 1)])
def test_out_state_that_overlaps_itself(strides):
    x = torch.zeros(2, 1, 2, 2)
    state = torch.zeros(40).as_strided((2, 2, 2, 2), strides)
    with pytest.raises(ValueError, match="out_state: got strides"):
        linear_attention(x, x, x, out_state=state)


@any_backend
@pytest.mark.parametrize("N", [1, 3, 40])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_absent_token_has_output_0_whatever_the_state_holds(backend, N, bad):
    x = torch.randn(1, N, 1, 2)
    mask = torch.zeros(1, N, dtype=torch.bool)
    state = torch.full((1, 1, 2, 2), bad)
    o = linear_attention(x, x, x, mask=mask, initial_state=state, backend=backend)
    assert (o == 0).all()


@any_backend
@pytest.mark.parametrize("N", [1, 2, 20, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sum_of_weights_whose_inverse_is_no_number(backend, N, causal):
    """Case: 1 / 2e-40 is infinite in float32, and 6e-40 / 2e-40 is 3."""
    q = torch.full((1, N, 1, 2), 1e-20)
    v = torch.full((1, N, 1, 2), 3.0)
    o = linear_attention(q, q / 10, v, normalize=True, scale=1.0, causal=causal, backend=backend)
    torch.testing.assert_close(o, v, rtol=2e-3, atol=0)
