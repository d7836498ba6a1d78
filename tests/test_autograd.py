"""Autograd around the operator: what is kept, what is asked for, and what is refused by name."""

import pytest
import torch

from linattn import causal_conv1d, linear_attention, multiplicative_noise
from operator_calls import fast, inputs_of, kinds, leaves_of


@fast
@kinds
@pytest.mark.parametrize("on", ["o", "state"])
def test_e4_second_derivatives_are_refused_by_name(backend, kind, on):
    """Never a detached gradient: the error says what to use."""
    inputs = leaves_of(inputs_of(kind, N=20, state=True))
    o, state = inputs.call(backend)
    leaves = list(inputs.tensors.values())
    y = (o if on == "o" else state).square().sum()
    grads = torch.autograd.grad(y, leaves, create_graph=True, allow_unused=True)
    attached = [g for g in grads if g is not None and g.requires_grad]
    assert attached
    for g in attached:
        with pytest.raises(RuntimeError, match='backend="reference"'):
            torch.autograd.grad(g.sum(), leaves, retain_graph=True, allow_unused=True)


@fast
@kinds
@pytest.mark.parametrize("lengths", [None, (1000, 24)])
def test_what_autograd_keeps(backend, kind, lengths):
    """Design 3: the inputs themselves, and states of at most N * Dv numbers a head.

    Many heads make segments as short as they get. An affine state is one row and column more.
    """
    N, D, H = 1024, 32, 32
    inputs = leaves_of(
        inputs_of(
            kind, N=N, B=1, heads=(H, 1, H), Dk=D, Dv=D, lengths=lengths, state=True,
            dtype=torch.float32,
        )
    )  # fmt: skip
    own = {x.untyped_storage().data_ptr() for x in inputs.tensors.values()}
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _, state = inputs.call(backend)
    own.add(state.untyped_storage().data_ptr())  # the caller's anyway
    if lengths is not None:
        own.add(inputs.options["cu_seqlens"].untyped_storage().data_ptr())
    rows, columns = state.shape[2:]
    assert sum(n for where, n in kept.items() if where not in own) <= N * H * rows * columns / D


@fast
@pytest.mark.parametrize("length", [16, 64])
def test_what_autograd_keeps_of_short_packed_sequences(backend, length):
    """The same bound: a sequence inside one segment needs no saved state of its own."""
    N, D, H = 1024, 64, 64
    inputs = leaves_of(
        inputs_of(
            "plain", heads=(H, H, H), Dk=D, Dv=D, lengths=(length,) * (N // length),
            dtype=torch.float32,
        )
    )  # fmt: skip
    own = {x.data_ptr() for x in (*inputs.tensors.values(), inputs.options["cu_seqlens"])}
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        inputs.call(backend)
    assert sum(n for where, n in kept.items() if where not in own) <= N * H * D


@fast
def test_nothing_is_kept_without_gradients(backend):
    inputs = inputs_of("token", N=200)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o, _ = inputs.call(backend)
    assert not kept
    assert not o.requires_grad


@fast
@pytest.mark.parametrize("kind", ["token", "delta channel"])
def test_only_the_gradients_asked_for(backend, kind):
    """Any one input alone requires a gradient, and gets the one it has among all."""
    inputs = inputs_of(kind, N=70, state=True)
    everything = leaves_of(inputs)
    o, _ = everything.call(backend)
    o.square().sum().backward()
    for name, x in inputs.tensors.items():
        inputs.tensors[name] = x.clone().requires_grad_()
        o, _ = inputs.call(backend)
        o.square().sum().backward()
        assert torch.equal(inputs.tensors[name].grad, everything.tensors[name].grad), name
        inputs.tensors[name] = x


def noisy(x, q, backend):
    return multiplicative_noise(x, 0.5)


def convolved(x, q, backend):
    return causal_conv1d(x[:, :, 0], torch.ones(4, 2), backend=backend)


def attended(x, q, backend):
    return linear_attention(x, q, q, backend=backend)


@fast
@pytest.mark.parametrize("function", [attended, convolved, noisy])
def test_forward_mode_is_refused_at_every_level(backend, function):
    """Case: the tangent of an outer jvp, and that of a jvp which is compiled, were 0."""
    q, one = torch.rand(2, 1, 20, 1, 4), torch.ones(())

    def call(x):
        return function(x, q[0], backend)

    def nested(x):
        return torch.func.jvp(lambda y: call(x) * y, (one,), (one,))[1]

    def other(y):  # nothing of what the operator gets has a tangent
        return call(q[0]) * y

    for f, x in ((call, q[0]), (nested, q[0]), (torch.vmap(call, randomness="same"), q)):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(f, (x,), (x,))
    torch.func.jvp(other, (one,), (one,))
    compiled = torch.compile(
        lambda x, t: torch.func.jvp(call, (x,), (t,)), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="forward-mode"):
        compiled(q[0], q[0])


@fast
@pytest.mark.parametrize("N", [2, 20])
def test_forward_mode_is_refused_and_not_zero(backend, N):
    """Case: torch.func.jvp gave a tangent of zeros, in silence."""
    q = torch.rand(1, N, 1, 4)
    with pytest.raises(NotImplementedError, match=r"forward-mode.*reference"):
        torch.func.jvp(lambda x: linear_attention(x, q, q, backend=backend), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="multiplicative_noise: forward-mode"):
            multiplicative_noise(dual, 0.1)
        linear_attention(q, q, q, backend=backend)  # no tangent: nothing is lost
    _, tangent = torch.func.jvp(
        lambda x: linear_attention(x, q, q, backend="reference"), (q,), (q,)
    )
    torch.testing.assert_close(tangent, linear_attention(q, q, q))  # o is linear in q
