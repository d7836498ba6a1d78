"""Every fast backend against the token loop in float64: o, final state and all gradients."""

import pytest
import torch

from linattn import linear_attention
from linattn.testing import Case, compare, make_inputs
from operator_calls import DECAYED, KINDS, check, fast, kinds


@fast
@kinds
@pytest.mark.parametrize("N", [0, 1, 2, 7, 16, 17, 31, 33, 63, 64, 65, 127, 129, 300])
def test_lengths(backend, kind, N):
    """Case D6; with an initial state and with none."""
    check(backend, N=N, B=1, state=bool(N % 2), **KINDS[kind])
    check(backend, N=N, B=2, heads=(1, 1, 1), dtype=torch.float32, state=True, **KINDS[kind])


@fast
@kinds
def test_a_thousand_tokens(backend, kind):
    check(backend, N=1000, B=1, heads=(1, 1, 1), Dk=16, Dv=8, **KINDS[kind])


@fast
@kinds
@pytest.mark.parametrize(
    ("Dk", "Dv"), [(1, 1), (3, 5), (32, 32), (16, 64), (64, 64), (48, 96), (128, 128), (256, 64)]
)
def test_sizes(backend, kind, Dk, Dv):
    """Case D22: no power of two, no multiple of anything, Dk other than Dv."""
    check(backend, N=70, B=1, heads=(1, 1, 1), Dk=Dk, Dv=Dv, dtype=torch.float32, **KINDS[kind])


@fast
@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(backend, kind, dtype):
    check(backend, N=130, Dk=32, Dv=32, state=True, dtype=dtype, **KINDS[kind])


@fast
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_with_float32_gates(backend, kind, dtype):
    """Case D18 at the operator: q, k, v in 16 bits, the rest in float32; gradients follow."""
    inputs = make_inputs(Case(N=80, dtype=dtype, **KINDS[kind]))
    for name in ("log_decay", "beta"):
        if name in inputs.tensors:
            inputs.tensors[name] = inputs.tensors[name].float()
    assert not compare(inputs, backend)
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    o, state = inputs.call(backend)
    assert o.dtype == dtype
    assert state.dtype == torch.float32  # cases D19 and E1
    o.sum().backward()
    assert all(x.grad.dtype == x.dtype for x in leaves.values())


@fast
@pytest.mark.parametrize("kind", DECAYED)
@pytest.mark.parametrize("strength", [1.4, 20.0, 30.0, 1000.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_strong_decay(backend, kind, strength, dtype):
    """Case D9: anything in [-strength, 0], then all of it at -strength."""
    case = {"N": 130, "B": 1, "Dk": 6, "state": True, "dtype": dtype, **KINDS[kind]}
    check(backend, strength=strength, **case)
    inputs = make_inputs(Case(**case))
    inputs.tensors["log_decay"].fill_(-strength)
    assert not compare(inputs, backend)
    if inputs.tensors["log_decay"].dim() == 4:  # one strong channel beside a weak one
        inputs.tensors["log_decay"][..., 1] = -0.01
        assert not compare(inputs, backend)


@fast
@pytest.mark.parametrize("kind", DECAYED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hard_resets(backend, kind, dtype):
    """Case D10, with -inf scattered over tokens, heads and channels."""
    check(backend, N=130, B=1, reset=True, state=True, dtype=dtype, **KINDS[kind])


@fast
@kinds
@pytest.mark.parametrize(
    "heads", [(1, 1, 4), (4, 2, 2), (2, 2, 6), (1, 4, 2), (4, 1, 1), (3, 1, 3), (2, 4, 1)]
)
def test_head_groups(backend, kind, heads):
    """Case D23."""
    check(backend, N=40, heads=heads, state=True, **KINDS[kind])


@fast
@kinds
@pytest.mark.parametrize("lengths", [(5, 1, 70, 3), (0, 64, 0, 0, 65, 1, 0), (0,), (9, 8, 7, 6)])
def test_packed_sequences(backend, kind, lengths):
    """Case D8, with empty sequences among them."""
    for state, mask in ((True, False), (False, True)):
        check(backend, lengths=lengths, state=state, mask=mask, **KINDS[kind])
    check(backend, lengths=lengths, state=True, dtype=torch.float32, **KINDS[kind])


@fast
@kinds
@pytest.mark.parametrize("N", [1, 20, 150])
def test_mask(backend, kind, N):
    check(backend, N=N, mask=True, state=True, **KINDS[kind])


@fast
@kinds
@pytest.mark.parametrize("on", ["o", "state"])
def test_loss_on_one_output_only(backend, kind, on):
    """Case D11."""
    check(backend, on=on, N=70, state=True, **KINDS[kind])


def strided(x, how):
    """Return the numbers of x, laid out in memory in another way."""
    if how == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "channels before tokens":
        return x.transpose(1, -1).contiguous().transpose(1, -1)
    if how == "every second":
        return x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=-1)[:, ::2, ..., ::2]
    return torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]  # slice of a fused one


@fast
@kinds
@pytest.mark.parametrize("how", ["heads first", "channels before tokens", "every second", "fused"])
def test_strides_change_no_bit(backend, kind, how):
    """Case D21, the upstream gradient strided as well."""
    inputs = make_inputs(Case(N=70, state=True, dtype=torch.float32, **KINDS[kind]))

    def results(tensors, layout):
        leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        before = [x.clone() for x in tensors.values()]
        o, state = linear_attention(**leaves, **inputs.options, return_state=True, backend=backend)
        grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
        grads = torch.autograd.grad(o, list(leaves.values()), layout(grad))
        assert all(torch.equal(a, b) for a, b in zip(before, tensors.values(), strict=True))
        return o, state, *grads

    views = {
        n: x if x.dim() < 3 or n == "initial_state" else strided(x, how)
        for n, x in inputs.tensors.items()
    }
    plain = results(inputs.tensors, lambda x: x)
    viewed = results(views, lambda x: strided(x, how))
    assert all(torch.equal(a, b) for a, b in zip(plain, viewed, strict=True))


@fast
def test_expanded_heads_and_batch(backend):
    k = torch.randn(1, 70, 1, 8).expand(2, 70, 4, 8)
    q, v = torch.randn(2, 70, 4, 8), torch.randn(2, 70, 4, 8)
    a = linear_attention(q, k, v, backend=backend)
    assert torch.equal(a, linear_attention(q, k.contiguous(), v, backend=backend))


@fast
@kinds
@pytest.mark.parametrize("mask", [False, True])
def test_gradcheck(backend, kind, mask):
    """Against numerical derivatives, which know nothing of the reference. Case D11."""
    case = Case(N=5, Dk=3, Dv=4, heads=(2, 1, 2), B=1, state=True, mask=mask, **KINDS[kind])
    inputs = make_inputs(case)
    names = list(inputs.tensors)

    def call(*tensors):
        return linear_attention(
            **dict(zip(names, tensors, strict=True)),
            **inputs.options,
            return_state=True,
            backend=backend,
        )

    leaves = [x.requires_grad_() for x in inputs.tensors.values()]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=False)
