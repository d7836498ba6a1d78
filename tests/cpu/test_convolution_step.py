"""causal_conv1d of a few tokens on the native kernels, without gradients, the state in place."""

import pytest
import torch

from convolution_calls import make
from linattn import backends, causal_conv1d, convolution
from linattn.cpu import convolution as native

cpu = pytest.mark.skipif(not backends()["cpu"].available, reason="the native kernels are not built")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def step(tensors, options, backend="cpu", **more):
    with torch.no_grad():
        return causal_conv1d(**{**tensors, **options, **more}, return_state=True, backend=backend)


@pytest.fixture
def served(monkeypatch):
    """Count the calls that the native step has served."""
    calls = []

    def decode(*arguments):
        found = native.decode(*arguments)
        if found is not None:
            calls.append(1)
        return found

    monkeypatch.setattr(convolution, "decode", decode)
    return calls


@cpu
@pytest.mark.parametrize("N", [1, 2, 5, 16])
@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("C", [1, 17, 300])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("state", [True, False])
def test_every_size_and_dtype_in_place(served, N, W, C, dtype, state):
    tensors, options = make(N=N, W=W, C=C, dtype=dtype, state=state, mask=N > 1)
    exact = step({n: x.double() for n, x in tensors.items()}, options, "reference")
    fresh = step(tensors, options)
    room = tensors["initial_state"] if state else torch.full_like(fresh[1], torch.nan)
    o, kept = step(tensors, options, out_state=room)
    assert len(served) == 2
    assert kept is room
    assert torch.equal(o, fresh[0])
    assert torch.equal(kept, fresh[1])
    for x, y in zip(fresh, exact, strict=True):
        assert torch.allclose(x.double(), y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@cpu
def test_token_by_token_is_the_whole_and_strides_are_read_in_place(served):
    tensors, options = make(N=40, C=33, dtype=torch.float32)
    whole, last = step(tensors, options)
    assert not served  # 40 tokens go the general way
    x, state = tensors.pop("x"), tensors.pop("initial_state").clone()
    turned = x.mT.contiguous().mT
    for t in range(40):
        o, _ = step(
            tensors | {"x": turned[:, t : t + 1], "initial_state": state}, options, out_state=state
        )
        assert torch.allclose(o[:, 0], whole[:, t], atol=1e-6)
    assert len(served) == 40
    assert torch.equal(state, last)


@cpu
@pytest.mark.parametrize("shift", [-4, 4])
def test_a_state_that_overlaps_what_is_read_goes_the_general_way(served, shift):
    tensors, options = make(N=3, C=8, W=4, dtype=torch.float32)
    o, expected = step(tensors, options)
    state = tensors["initial_state"]
    room = torch.zeros(state.numel() + 16)
    before = room[8:][: state.numel()].view_as(state).copy_(state)
    after = room[8 + shift :][: state.numel()].view_as(state)
    o2, found = step(tensors | {"initial_state": before}, options, out_state=after)
    assert len(served) == 1
    assert torch.equal(o2, o)
    assert torch.equal(found, expected)


@cpu
def test_gradients_and_mapped_calls_go_elsewhere(served):
    tensors, options = make(N=3, dtype=torch.float64)
    expected = causal_conv1d(**tensors, **options)
    assert len(served) == 1
    x = tensors.pop("x")
    causal_conv1d(x.clone().requires_grad_(), **tensors, **options).sum().backward()
    many = torch.vmap(lambda x: causal_conv1d(x, **tensors, **options))(x.expand(2, *x.shape))
    assert torch.allclose(many[1], expected)
    assert len(served) == 1


@cpu
def test_a_negative_view_is_read_and_written_right():
    tensors, options = make(N=2, dtype=torch.float32)
    o, last = step(tensors, options)
    negative = torch._neg_view(-tensors["initial_state"])
    assert negative.is_neg()
    o2, kept = step(tensors | {"initial_state": negative}, options, out_state=negative)
    assert torch.equal(o2, o)
    assert torch.equal(kept.resolve_neg(), last)


@pytest.mark.parametrize("activation", ["relu", 1, True, ["silu"]])
def test_another_activation_is_refused_by_words_for_one_token_too(activation):
    tensors, _ = make(N=1)
    with pytest.raises(ValueError, match=r"activation: got .*expected None or"):
        causal_conv1d(**tensors, activation=activation)
