"""Torch around causal_conv1d: opcheck, vmap, compile, export, autocast, what is saved."""

import pytest
import torch

from convolution_calls import make
from linattn import causal_conv1d
from operator_calls import fast


@fast
@pytest.mark.parametrize("lengths", [None, (30, 0, 10)])
def test_opcheck(backend, lengths):
    tensors, options = make(lengths=lengths, dtype=torch.float32)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    operator = getattr(torch.ops.linattn, f"{backend}_convolution").default
    arguments = (
        leaves["x"], leaves["weight"], leaves["bias"], True, None, leaves["initial_state"],
        options.get("cu_seqlens"),
    )  # fmt: skip
    torch.library.opcheck(operator, arguments)


@fast
@pytest.mark.parametrize(
    "mapped", [("x",), ("x", "initial_state", "mask"), ("weight",), ("x", "bias")]
)
@pytest.mark.parametrize("lengths", [None, (10, 0, 30)])
def test_vmap_equals_one_call_after_another(backend, mapped, lengths):
    calls = [make(mask=True, lengths=lengths, seed=seed) for seed in range(3)]
    first = {**calls[0][0], "mask": calls[0][1]["mask"]}
    options = {n: x for n, x in calls[0][1].items() if n != "mask"}
    stacked = {n: torch.stack([{**t, **o}[n] for t, o in calls]) for n in mapped}

    def call(given):
        return causal_conv1d(**{**first, **given}, **options, return_state=True, backend=backend)

    o, state = torch.vmap(call)(stacked)
    for i in range(3):
        expected_o, expected_state = call({n: x[i] for n, x in stacked.items()})
        torch.testing.assert_close(o[i], expected_o)
        torch.testing.assert_close(state[i], expected_state)


@fast
def test_refusals_of_derivatives(backend):
    tensors, options = make()
    x = tensors.pop("x").requires_grad_()
    o = causal_conv1d(x, **tensors, **options, backend=backend)
    (dx,) = torch.autograd.grad(o.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="reference"'):
        torch.autograd.grad(dx.sum(), x)
    with pytest.raises(NotImplementedError, match="causal_conv1d: forward-mode"):
        torch.func.jvp(
            lambda y: causal_conv1d(y, **tensors, **options, backend=backend),
            (x.detach(),), (x.detach(),),
        )  # fmt: skip


@fast
def test_what_autograd_keeps(backend):
    """The inputs themselves, and nothing else."""
    tensors, options = make(N=500, mask=True)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    own = {x.data_ptr() for x in (*leaves.values(), options["mask"])}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        causal_conv1d(**leaves, **options, backend=backend)
    assert {x.data_ptr() for x in kept} <= own


@pytest.mark.slow
def test_compile_export_and_autocast():
    weight = torch.randn(5, 4, requires_grad=True)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return causal_conv1d(x, weight, activation="silu")

    x = torch.randn(2, 30, 5)
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), Layer()(x))
    length = {1: torch.export.Dim("N", min=2, max=4096)}
    exported = torch.export.export(Layer(), (x,), dynamic_shapes=(length,)).module()
    longer = torch.randn(2, 333, 5)
    torch.testing.assert_close(exported(longer), Layer()(longer))
    with torch.autocast("cpu", torch.bfloat16):  # few operations: it stays in the dtype it has
        assert causal_conv1d(x, weight).dtype == torch.float32
