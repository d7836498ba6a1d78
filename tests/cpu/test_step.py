"""Decoding on the native kernels: 1 to 16 tokens, states of 32, 64 and 16 bits, in place."""

import pytest
import torch

from linattn import backends, linear_attention, ops
from linattn.cpu import step
from linattn.testing import Case, make_inputs, relative_error
from operator_calls import CAUSAL, KINDS, any_backend, causal_kinds, check, inputs_of

cpu = pytest.mark.skipif(not backends()["cpu"].available, reason="the native kernels are not built")


def decode(inputs, backend="cpu", **options):
    """Without gradients, so that the step serves."""
    with torch.no_grad():
        return linear_attention(
            **{**inputs.tensors, **inputs.options, **options}, return_state=True, backend=backend
        )


@pytest.fixture
def served(monkeypatch):
    """Count the calls that the native step has served."""
    calls = []

    def decode(*arguments):
        found = step.decode(*arguments)
        if found is not None:
            calls.append(1)
        return found

    monkeypatch.setattr(ops, "decode", decode)
    return calls


@cpu
@causal_kinds
@pytest.mark.parametrize("N", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 1, 2)])
@pytest.mark.parametrize(("Dk", "Dv"), [(1, 1), (5, 7), (17, 40), (64, 129)])
def test_every_kind_dtype_and_size(served, kind, N, dtype, heads, Dk, Dv):
    """The last sizes end in every width of column tile: 8, 4 and 1 vectors, and single ones."""
    options = {**KINDS[kind], "N": N, "Dk": Dk, "Dv": Dv, "heads": heads, "dtype": dtype}
    inputs = make_inputs(Case(state=True, mask=N > 1, **options))
    exact = inputs.double().call("reference")
    got = decode(inputs)
    assert served
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 1.5e-2)
    for x, y in zip(got, exact, strict=True):
        assert relative_error(x.double(), y) < tolerance


@cpu
@causal_kinds
def test_strided_inputs_are_read_in_place(served, kind):
    inputs = inputs_of(kind, N=4, state=True, dtype=torch.float32)
    o, state = decode(inputs)
    strided = {}
    for name, x in inputs.tensors.items():  # every second element of a wider tensor
        if name == "initial_state":  # is read in place where it is contiguous only
            strided[name] = x
            continue
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        wide[..., ::2] = x
        strided[name] = wide[..., ::2]
    inputs.tensors = strided
    again, state_again = decode(inputs)
    assert len(served) == 2
    assert torch.equal(o, again)
    assert torch.equal(state, state_again)


@cpu
def test_gradients_tangents_mapped_and_longer_calls_go_elsewhere(served):
    inputs = inputs_of("token", N=3, state=True)
    q, k, v, g, state = inputs.tensors.values()

    def call(q, state):
        return linear_attention(q, k, v, g, initial_state=state, backend="cpu")

    expected = call(q, state)
    assert len(served) == 1
    call(q.clone().requires_grad_(), state).sum().backward()
    call(q, state.clone().requires_grad_()).sum().backward()
    q2, s2 = q.expand(2, *q.shape), state.expand(2, *state.shape)
    assert torch.allclose(torch.vmap(call)(q2, s2)[1], expected)
    long = inputs_of("token", N=17)
    decode(long)
    decode(inputs_of("every token", N=2))
    assert len(served) == 1

    first = {n: x[:, :1] if x.dim() > 2 and n != "initial_state" else x for n, x in
             inputs.tensors.items()}  # fmt: skip
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first.pop("q"), torch.ones_like(q[:, :1]))
        o = linear_attention(dual, **first, backend="cpu")
        tangent = torch.autograd.forward_ad.unpack_dual(o).tangent
    ones = linear_attention(torch.ones_like(q[:, :1]), **first, backend="cpu")
    assert relative_error(tangent, ones) < 1e-12


@cpu
@pytest.mark.parametrize("shift", [0, 3, 8])
def test_an_out_state_that_overlaps_the_initial_state_is_not_read_after_it_is_written(shift):
    inputs = inputs_of("token", N=2, state=True, dtype=torch.float32)
    o, expected = decode(inputs)
    state = inputs.tensors["initial_state"]
    for sign in (1, -1):
        room = torch.zeros(state.numel() + 16)
        start = 8 - sign * shift // 2
        before = room[start : start + state.numel()].view_as(state).copy_(state)
        after = room[start + sign * shift :][: state.numel()].view_as(state)
        inputs.tensors["initial_state"] = before
        o2, returned = decode(inputs, out_state=after)
        assert returned is after
        assert relative_error(after, expected) < 1e-6
        assert relative_error(o2, o) < 1e-6


# --- states of bfloat16 ---------------------------------------------------------------------------


@any_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", [0, 1, 2, 16, 40])
def test_a_state_of_bfloat16_is_rounded_once_a_call(backend, kind, N):
    """Read exactly; the sums and the returned state are of float32; out_state is rounded."""
    inputs = inputs_of(kind, N=N, state=True, dtype=torch.float32, Dk=9, Dv=35)
    state = inputs.tensors["initial_state"].bfloat16()
    inputs.tensors["initial_state"] = state.float()
    o, last = decode(inputs, backend)
    inputs.tensors["initial_state"] = state
    before = state.clone()
    _, returned = decode(inputs, backend)
    assert returned.dtype == torch.float32
    assert torch.equal(state, before)
    assert relative_error(returned, last) < 1e-6
    out = torch.full_like(state, torch.nan)
    for target in (out, state):
        o2, written = decode(inputs, backend, out_state=target)
        assert written is target
        assert relative_error(o2, o) < 1e-6
        # Half a unit in the last place of 8 bits, and what float32 may move before rounding.
        assert ((target.float() - last).abs() <= 2**-8 * last.abs() + 1e-5).all()


@any_backend
def test_gradients_reach_a_state_of_bfloat16(backend):
    inputs = inputs_of("token", N=3, state=True, dtype=torch.float32)
    state = inputs.tensors["initial_state"].bfloat16().requires_grad_()
    inputs.tensors["initial_state"] = state
    o, last = inputs.call(backend)
    (o.sum() + last.sum()).backward()
    assert state.grad.dtype == torch.bfloat16
    exact = state.detach().double().requires_grad_()
    double = inputs.double()
    double.tensors["initial_state"] = exact
    o, last = double.call("reference")
    (o.sum() + last.sum()).backward()
    assert relative_error(state.grad.double(), exact.grad) < 1e-2


@cpu
@pytest.mark.parametrize("N", [1, 2])
def test_rounding_to_bfloat16_is_that_of_torch(served, N):
    """To even; infinities and NaN stay what they are. S = k v' with k = 1 is v, rounded."""
    bits = torch.randint(
        -(2**31), 2**31, (1, 1, 1, 4099), generator=torch.Generator().manual_seed(0)
    )
    v = bits.to(torch.int32).view(torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38])
    v[..., : len(special)] = special
    v[..., -len(special) :] = special
    v = v.expand(1, N, 1, -1)
    out = torch.empty(1, 1, 1, v.shape[-1], dtype=torch.bfloat16)
    one, mask = torch.ones(1, N, 1, 1), torch.arange(N).view(1, N) == 0
    linear_attention(one, one, v, mask=mask, out_state=out, backend="cpu")
    assert served
    torch.testing.assert_close(
        out.flatten(), v[:, 0].bfloat16().flatten(), rtol=0, atol=0, equal_nan=True
    )


@any_backend
@pytest.mark.parametrize("kind", CAUSAL)
def test_many_steps_on_a_state_of_bfloat16_stay_near_float32(backend, kind):
    """64 steps, each with a rounding of 2^-9 at random: their sum grows as the square root."""
    inputs = inputs_of(kind, N=64, state=True, dtype=torch.float32, Dk=16, Dv=16)
    expected, _ = decode(inputs, "reference")
    state = inputs.tensors["initial_state"].bfloat16()
    outputs = []
    for t in range(64):
        part = {n: x[:, t : t + 1] if x.dim() > 2 and n != "initial_state" else x
                for n, x in inputs.tensors.items()}  # fmt: skip
        part["initial_state"] = state
        with torch.no_grad():
            outputs.append(
                linear_attention(**part, **inputs.options, out_state=state, backend=backend)
            )
    assert relative_error(torch.cat(outputs, 1), expected) < 8 * 2**-9


@cpu
def test_the_reference_matrix_serves_small_calls_too():
    """Gradients of the calls that the step serves without them."""
    for kind in CAUSAL:
        for N in (1, 3):
            check("cpu", **KINDS[kind], N=N, state=True, mask=True)


# --- what the step must leave to the checks, and to autograd --------------------------------------


def small():
    return {n: torch.rand(2, 1, 3, 4) for n in ("q", "k", "v")}


@any_backend
@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"causal": "nonsense"}, TypeError, "causal: got str"),
        ({"causal": None}, TypeError, "causal: got NoneType"),
        (
            {"causal": False, "log_decay": -torch.rand(2, 1, 3)},
            ValueError,
            "log_decay: got a decay",
        ),
        ({"causal": False, "beta": torch.rand(2, 1, 3)}, ValueError, "beta: got a delta rule"),
        ({"return_state": 1}, TypeError, "return_state: got int"),
        ({"return_state": torch.ones(2)}, TypeError, "return_state: got Tensor"),
        ({"mask": torch.tensor(True)}, ValueError, r"mask: got shape \[\]"),
        ({"beta": torch.tensor(1.0)}, ValueError, r"beta: got shape \[\]"),
        ({"scale": 10**400}, ValueError, "scale: got a number out of range"),
        ({"bias": True}, TypeError, "bias: got bool"),
        (
            {"out_state": torch.zeros(2, 3, 4, 1).expand(2, 3, 4, 4)},
            ValueError,
            "out_state: got str",
        ),
        (
            {"out_state": torch.zeros(2, 3, 4, 4, requires_grad=True)},
            ValueError,
            "out_state: got a tensor to overwrite",
        ),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.long, device="meta")}, ValueError, "cu_seqlens"),
    ],
)
def test_one_token_is_checked_like_many(backend, wrong, kind, message):
    with pytest.raises(kind, match=message):
        linear_attention(**{**small(), **wrong}, backend=backend)


@any_backend
@pytest.mark.parametrize("N", [1, 4, 20])
def test_autograd_notices_that_a_state_it_has_kept_was_overwritten(backend, N):
    x = torch.rand(1, N, 2, 4)
    state = torch.rand(1, 2, 4, 4)
    weight = torch.ones((), requires_grad=True)
    loss = (weight * state).square().sum()  # autograd keeps `state`
    version = state._version
    with torch.no_grad():
        linear_attention(x, x, x, initial_state=state, out_state=state, backend=backend)
    assert state._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@any_backend
@pytest.mark.parametrize("N", [1, 3, 20])
@pytest.mark.parametrize("shared", ["q", "k", "v", "log_decay", "beta", "initial_state"])
def test_an_out_state_in_the_memory_of_an_input(backend, N, shared):
    """All inputs are read before it is written."""
    inputs = make_inputs(
        Case(N=N, B=1, Dk=4, Dv=4, decay="channel", delta=True, state=True, dtype=torch.float32)
    )
    o, state = decode(inputs, "reference")
    tensors = dict(inputs.tensors)
    x = tensors[shared]
    room = torch.zeros(max(x.numel(), state.numel()) + 3)
    tensors[shared] = room[: x.numel()].view_as(x).copy_(x)
    out = room[3 : 3 + state.numel()].view_as(state)
    with torch.no_grad():
        o2 = linear_attention(**tensors, **inputs.options, out_state=out, backend=backend)
    assert relative_error(o2, o) < 1e-5
    assert relative_error(out, state) < 1e-5
