"""Kinds of fault reported of other projects (cases D and E), each by its smallest input."""

import pytest
import torch

from linattn import linear_attention
from linattn.testing import relative_error
from operator_calls import (
    CAUSAL,
    KINDS,
    any_backend,
    fast,
    inputs_of,
    kinds,
    leaves_of,
    pick,
    with_gradients,
)

decayed = pytest.mark.parametrize("kind", [k for k, o in KINDS.items() if o.get("decay")])
gated = pytest.mark.parametrize(
    "kind", [k for k, o in KINDS.items() if o.get("decay") in ("token", "channel")]
)


@kinds
def test_d1_every_kind_runs_forward_and_backward_on_a_cpu(kind):
    inputs = leaves_of(inputs_of(kind, N=16, B=2, Dk=64, Dv=64, heads=(1, 1, 1)))
    o, state = inputs.call("auto")
    (o.sum() + state.sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in inputs.tensors.values())


@any_backend
@kinds
@pytest.mark.parametrize("N", [0, 1, 20])
def test_d3_the_structure_is_the_same_for_every_length(backend, kind, N):
    """One tensor, or a pair with return_state; shapes and dtypes do not depend on N."""
    inputs = inputs_of(kind, B=2, N=N, heads=(1, 3, 3), Dk=32, Dv=48, dtype=torch.float32)
    options = {**inputs.options, "backend": backend}
    alone = linear_attention(**inputs.tensors, **options)
    assert isinstance(alone, torch.Tensor)
    pair = linear_attention(**inputs.tensors, **options, return_state=True)
    assert isinstance(pair, tuple)
    assert len(pair) == 2
    assert torch.equal(pair[0], alone)
    one = int(bool(KINDS[kind].get("bias")) or bool(KINDS[kind].get("normalize")))
    assert pair[0].shape == (2, N, 3, 48)
    assert pair[1].shape == (2, 3, 32 + one, 48 + one)
    assert pair[0].dtype == pair[1].dtype == torch.float32


@fast
@decayed
@pytest.mark.parametrize("log_decay", [-1.3, -1.4, -20.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_d9_a_constant_strong_decay_is_finite_forward_and_backward(backend, kind, log_decay, dtype):
    inputs = inputs_of(kind, N=128, B=1, heads=(1, 1, 1), Dk=16, Dv=8, dtype=dtype)
    inputs.tensors["log_decay"].fill_(log_decay)
    o, state, grads = with_gradients(inputs, backend, lambda o, S: o.sum() + S.sum())
    assert all(torch.isfinite(x).all() for x in (o, state, *grads.values()))
    exact, _ = linear_attention(
        **{n: x.double() for n, x in inputs.tensors.items()},
        **inputs.options,
        return_state=True,
        backend="reference",
    )
    assert relative_error(o.double(), exact) < (1e-5 if dtype == torch.float32 else 1.5e-2)


@fast
@gated
@pytest.mark.parametrize("gate", [-torch.inf, -1e30])
@pytest.mark.parametrize("at", [0, 1, 16, 33, 63, 64, 65])
def test_d10_a_hard_reset_is_a_restart(backend, kind, gate, at):
    """From the reset on, outputs, the state and gradients are those of a sequence begun there."""
    inputs = inputs_of(kind, N=66, B=1)
    inputs.tensors["log_decay"][:, at] = gate
    later = slice(at, 66)
    o, state, grads = with_gradients(
        inputs, backend, lambda o, S: o[:, later].square().sum() + S.square().sum()
    )
    o2, state2, grads2 = with_gradients(
        pick(inputs, later), "reference", lambda o, S: o.square().sum() + S.square().sum()
    )
    assert relative_error(o[:, later], o2) < 1e-12
    assert relative_error(state, state2) < 1e-12
    for name, g in grads.items():
        assert not g[:, :at].any(), name  # nothing before the reset matters
        error = float((g[:, later] - grads2[name]).norm())
        assert error <= 1e-11 * max(1.0, float(grads2[name].norm())), name


@fast
@pytest.mark.parametrize("kind", ["channel", "delta channel"])
def test_d10_a_reset_of_one_channel_leaves_the_others(backend, kind):
    inputs = inputs_of(kind, N=66, B=1)
    inputs.tensors["log_decay"][:, 33, :, 1] = -torch.inf
    o, state, grads = with_gradients(inputs, backend, lambda o, S: o.sum() + S.square().sum())
    o2, state2, grads2 = with_gradients(
        inputs, "reference", lambda o, S: o.sum() + S.square().sum()
    )
    assert relative_error(o, o2) < 1e-12
    assert relative_error(state, state2) < 1e-12
    for name, g in grads.items():
        assert torch.isfinite(g).all()
        assert relative_error(g, grads2[name]) < 1e-10, name


@fast
@pytest.mark.parametrize("kind", CAUSAL)
def test_d11_a_single_step_has_gradients_for_everything(backend, kind):
    inputs = inputs_of(kind, N=1, state=True)
    _, _, got = with_gradients(inputs, backend, lambda o, S: o.sum() + S.square().sum())
    _, _, expected = with_gradients(inputs, "reference", lambda o, S: o.sum() + S.square().sum())
    for name, g in got.items():
        torch.testing.assert_close(g, expected[name], rtol=1e-10, atol=1e-12)
        assert g.any() or name == "q", name  # a first normalised token reads only itself


@fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_d19_and_e1_long_decoding_keeps_float32_states(backend, dtype):
    """2000 steps of 16-bit inputs: the normaliser counts on, the outputs do not drift."""
    N = 2000
    inputs = inputs_of("affine", N=N, B=1, heads=(2, 1, 2), Dk=8, Dv=8, dtype=dtype)
    exact, last = linear_attention(
        **{n: x.double() for n, x in inputs.tensors.items()},
        **inputs.options,
        return_state=True,
    )
    state, steps = None, []
    for t in range(N):
        step = pick(inputs, slice(t, t + 1))
        step.tensors["initial_state"] = state
        if state is not None:
            step.options["out_state"] = state
        o, state = step.call(backend)
        steps.append(o)
        assert state.dtype == torch.float32
    assert float(state[..., -1, -1].min()) == float(state[..., -1, -1].max()) == N
    assert relative_error(state.double(), last) < 1e-5
    tail = torch.cat(steps[-200:], 1).double()
    assert relative_error(tail, exact[:, -200:]) < 2 * torch.finfo(dtype).eps


@fast
@pytest.mark.parametrize("N", [100, 4096])
def test_d19_gates_are_summed_beyond_sixteen_bits(backend, N):
    """A bfloat16 gate of -1/256 a token, summed in bfloat16, would stop at -1."""
    one = torch.ones(1, N, 1, 1, dtype=torch.bfloat16)
    g = torch.full((1, N, 1), -1 / 256, dtype=torch.bfloat16)
    k = torch.zeros_like(one)
    k[:, 0] = 1
    _, state = linear_attention(one, k, one, g, scale=1.0, return_state=True, backend=backend)
    expected = torch.tensor(-(N - 1) / 256, dtype=torch.float64).exp()
    torch.testing.assert_close(state.double().flatten(), expected.view(1), rtol=1e-5, atol=0)


@fast
@kinds
@pytest.mark.parametrize(("Dk", "Dv"), [(8, 8), (80, 80), (192, 192), (256, 512)])
def test_d22_head_sizes_and_odd_head_counts(backend, kind, Dk, Dv):
    inputs = inputs_of(kind, N=18, B=1, heads=(3, 3, 3), Dk=Dk, Dv=Dv)
    o, state = inputs.call(backend)
    expected = inputs.call("reference")
    assert relative_error(o, expected[0]) < 1e-10
    assert relative_error(state, expected[1]) < 1e-10


@any_backend
@kinds
@pytest.mark.parametrize("N", [1, 20])
@pytest.mark.parametrize("heads", [(2, 2, 6), (6, 2, 2), (1, 6, 3)])
def test_d23_groups_are_blocks_and_gradients_are_summed(backend, kind, heads, N):
    """Head h reads group h // (H / Hx), as repeat_interleave writes it out."""
    inputs = leaves_of(inputs_of(kind, N=N, heads=heads))
    o, state = inputs.call(backend)
    upstream = torch.randn_like(o), torch.randn_like(state)
    leaves = list(inputs.tensors.values())
    grads = torch.autograd.grad((o, state), leaves, upstream)
    for name in ("q", "k", "v"):
        x = inputs.tensors[name]
        inputs.tensors[name] = x.repeat_interleave(6 // x.shape[2], dim=2)
    o2, state2 = inputs.call(backend)
    grads2 = torch.autograd.grad((o2, state2), leaves, upstream)
    for a, b in zip((o, state, *grads), (o2, state2, *grads2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@any_backend
@kinds
@pytest.mark.parametrize("N", [1, 20])
def test_e4_outputs_and_states_are_attached_to_the_graph(backend, kind, N):
    inputs = leaves_of(inputs_of(kind, N=N, state=True))
    o, state = inputs.call(backend)
    assert o.requires_grad
    assert state.requires_grad
    for name, x in inputs.tensors.items():  # and each input alone
        alone = inputs_of(kind, N=N, state=True)
        alone.tensors[name].requires_grad_()
        o, state = alone.call(backend)
        reached = torch.autograd.grad(o.sum() + state.sum(), alone.tensors[name])[0]
        assert reached.shape == x.shape
        assert reached.dtype == x.dtype
