"""Torch around the operator: opcheck, compile, export, autocast, checkpointing, what is saved."""

from dataclasses import replace

import pytest
import torch

from linattn import linear_attention, multiplicative_noise
from linattn._contracts import _ARGUMENTS
from linattn.layers import LinearAttention
from linattn.testing import Case, make_inputs
from operator_calls import KINDS, fast, inputs_of, kinds, leaves_of


def operator_arguments(inputs, kind, backend):
    """Return the operator's name and the arguments that linear_attention hands to it."""
    options = KINDS[kind]
    family = "delta" if options.get("delta") else "additive"
    found = {
        **inputs.tensors,
        "scale": inputs.options.get("scale", 0.4),
        "save": True,
        **{n: inputs.options.get(n) for n in ("mask", "cu_seqlens", "bias", "normalize", "causal")},
    }
    names = [a.split()[-1] for a in _ARGUMENTS[family].split(", ")]
    return f"{backend}_{family}", [found.get(name) for name in names]


@fast
@kinds
@pytest.mark.parametrize("layout", ["plain", "masked", "packed"])
def test_opcheck_of_forward_and_backward_operators(backend, kind, layout):
    lengths = (30, 0, 40) if layout == "packed" else None
    inputs = inputs_of(
        kind, N=70, B=1, heads=(2, 1, 2), lengths=lengths, mask=layout == "masked",
        state=layout != "masked", dtype=torch.float32,
    )  # fmt: skip
    name, arguments = operator_arguments(inputs, kind, backend)
    checks = ("test_schema", "test_faketensor")
    forward = getattr(torch.ops.linattn, name).default
    torch.library.opcheck(forward, tuple(arguments), test_utils=checks)
    o, state, saved = forward(*arguments)
    backward = getattr(torch.ops.linattn, name + "_backward").default
    grads = torch.randn_like(o), torch.randn_like(state)
    torch.library.opcheck(backward, (*grads, state, saved, *arguments), test_utils=checks)


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


@pytest.mark.slow
def test_d20_compiled_by_inductor():
    """T = 64, then 65, forward and backward, equal to eager; one graph for both lengths."""
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, fullgraph=True, dynamic=True)
    for N in (64, 65):
        inputs = leaves_of(inputs_of("token", N=N, dtype=torch.float32))
        leaves = list(inputs.tensors.values())
        o, expected = compiled(*leaves), linear_attention(*leaves)
        torch.testing.assert_close(o, expected)
        upstream = torch.randn_like(o)
        torch.testing.assert_close(
            torch.autograd.grad(o, leaves, upstream),
            torch.autograd.grad(expected, leaves, upstream),
        )


def test_d20_one_decode_step_exports():
    class Step(torch.nn.Module):
        def forward(self, q, k, v, g, beta, state):
            return linear_attention(q, k, v, g, beta, initial_state=state, return_state=True)

    inputs = inputs_of("delta channel", N=1, state=True, dtype=torch.float32)
    arguments = tuple(inputs.tensors.values())
    exported = torch.export.export(Step(), arguments)
    torch.testing.assert_close(exported.module()(*arguments), Step()(*arguments))


@fast
@kinds
def test_d18_autocast_is_the_call_in_the_rounded_dtype(backend, kind):
    """Nothing else changes inside, and float64 is left alone."""
    inputs = inputs_of(kind, N=70, state=True, dtype=torch.float32)
    rounded = inputs_of(kind, N=70, state=True, dtype=torch.float32)
    for name in ("q", "k", "v"):
        rounded.tensors[name] = rounded.tensors[name].bfloat16()
    expected = rounded.call(backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = inputs.call(backend)
        assert inputs_of(kind, N=5).call(backend)[0].dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@fast
@kinds
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_with_autograd(backend, kind, packed):
    lengths = (30, 0, 40) if packed else None
    inputs = leaves_of(inputs_of(kind, N=70, state=True, lengths=lengths, dtype=torch.float32))
    name, arguments = operator_arguments(inputs, kind, backend)
    torch.library.opcheck(getattr(torch.ops.linattn, name).default, tuple(arguments))


@pytest.mark.parametrize("kind", ["plain", "channel", "delta token", "affine", "every token"])
def test_compile_fullgraph_without_recompiling_for_each_length(kind):
    """Case D20: T = 64, then others; two graphs at most, values and gradients as in eager."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    inputs = make_inputs(Case(N=90, dtype=torch.float32, **KINDS[kind]))
    names = list(inputs.tensors)

    def call(*tensors):
        return linear_attention(
            **dict(zip(names, tensors, strict=True)), **inputs.options, return_state=True
        )

    compiled = torch.compile(call, fullgraph=True, backend=count)
    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (64, 65, 70, 90):
        x = [t[:, :n].clone().requires_grad_() for t in inputs.tensors.values()]
        expected = call(*x)
        for function in (compiled, whole):
            o = function(*x)
            torch.testing.assert_close(o, expected)
        got = torch.autograd.grad(o[0].sum() + o[1].sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(
            expected[0].sum() + expected[1].sum(), x))  # fmt: skip
    assert len(graphs) <= 2


def test_export_with_a_dynamic_length():
    class Mixer(torch.nn.Module):
        def forward(self, q, k, v, g):
            return linear_attention(q, k, v, g, return_state=True)

    x = make_inputs(Case(N=70, decay="token", dtype=torch.float32)).tensors
    length = {1: torch.export.Dim("N", min=2, max=4096)}
    exported = torch.export.export(Mixer(), tuple(x.values()), dynamic_shapes=(length,) * 4)
    y = tuple(make_inputs(Case(N=133, decay="token", dtype=torch.float32)).tensors.values())
    torch.testing.assert_close(exported.module()(*y), Mixer()(*y))


@fast
@kinds
def test_autocast(backend, kind):
    """Case D18: o in the autocast dtype, the state in float32, gradients as their inputs."""
    inputs = make_inputs(Case(N=70, state=True, dtype=torch.float32, **KINDS[kind]))
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    exact, _ = inputs.call(backend)
    with torch.autocast("cpu", torch.bfloat16):
        o, state = inputs.call(backend)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (o.float() - exact).norm() < 1.5e-2 * exact.norm()
    o.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves.values())


def test_activation_checkpointing():
    x = [t.requires_grad_() for t in make_inputs(Case(N=70, decay="channel")).tensors.values()]
    o = torch.utils.checkpoint.checkpoint(linear_attention, *x, use_reentrant=False)
    a, b = (torch.autograd.grad(y.square().sum(), x) for y in (o, linear_attention(*x)))
    assert all(torch.equal(i, j) for i, j in zip(a, b, strict=True))


@fast
@kinds
@pytest.mark.parametrize("packed", [False, True])
def test_vmap_equals_one_call_after_another(backend, kind, packed, recwarn):
    """Over every argument, and with k shared; without torch's slow fallback and its warning."""
    lengths = (30, 0, 40) if packed else None
    calls = [
        inputs_of(kind, N=70, state=True, lengths=lengths, heads=(2, 1, 2), seed=seed)
        for seed in range(3)
    ]
    names = list(calls[0].tensors)
    shared = calls[0].tensors["k"]
    for inputs in calls:
        inputs.tensors["k"] = shared

    def call(*tensors):
        x = dict(zip(names, tensors, strict=True))
        return replace(calls[0], tensors=x).call(backend)

    stacked = [
        shared if name == "k" else torch.stack([inputs.tensors[name] for inputs in calls], dim=1)
        if name == "q" else torch.stack([inputs.tensors[name] for inputs in calls])
        for name in names
    ]  # fmt: skip
    dims = tuple(None if name == "k" else 1 if name == "q" else 0 for name in names)
    o, state = torch.vmap(call, in_dims=dims)(*stacked)
    for i, inputs in enumerate(calls):
        expected_o, expected_state = inputs.call(backend)
        torch.testing.assert_close(o[i], expected_o)
        torch.testing.assert_close(state[i], expected_state)
    assert not [w for w in recwarn if "performance drop" in str(w.message)]


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


@fast
@pytest.mark.parametrize("options", [{}, {"decay": "token"}, {"bias": 1.0, "normalize": True}])
def test_export_of_a_layer_that_can_be_trained(backend, options):
    layer = LinearAttention(16, 2, backend=backend, **options)
    length = {1: torch.export.Dim("N", min=2, max=4096)}
    exported = torch.export.export(layer, (torch.randn(2, 70, 16),), dynamic_shapes=(length,))
    x = torch.randn(2, 333, 16)
    torch.testing.assert_close(exported.module()(x), layer(x))
