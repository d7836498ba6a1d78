"""Torch around the operator: opcheck, compile, export, autocast, checkpointing, vmap."""

from dataclasses import replace

import pytest
import torch

from linattn import causal_conv1d, linear_attention
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
@pytest.mark.parametrize("options", [{}, {"decay": "token"}, {"bias": 1.0, "normalize": True}])
def test_export_of_a_layer_that_can_be_trained(backend, options):
    layer = LinearAttention(16, 2, backend=backend, **options)
    length = {1: torch.export.Dim("N", min=2, max=4096)}
    exported = torch.export.export(layer, (torch.randn(2, 70, 16),), dynamic_shapes=(length,))
    x = torch.randn(2, 333, 16)
    torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("N", [1, 3])
def test_shapes_can_be_asked_of_meta_tensors(backend, N):
    """A device that knows no autocast."""
    q = torch.empty(2, N, 1, 8, device="meta")
    o, state = linear_attention(q, q, q, return_state=True, backend=backend)
    assert o.shape == q.shape
    assert state.shape == (2, 1, 8, 8)
    x = torch.empty(2, N, 8, device="meta")
    assert causal_conv1d(x, torch.empty(8, 4, device="meta"), backend=backend).shape == x.shape


def test_a_dtype_that_the_library_does_not_know_is_refused_by_words():
    x = torch.zeros(1, 1, 1, 8, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(TypeError, match=r"q: got torch.float8_e8m0fnu; expected"):
        linear_attention(x, x, x)
    with pytest.raises(TypeError, match=r"x: got torch.float8_e8m0fnu; expected"):
        causal_conv1d(x[:, 0], torch.ones(8, 4))
