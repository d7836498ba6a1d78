"""compile, export, autocast, checkpointing, opcheck, second derivatives, saved memory, import."""

import subprocess
import sys

import pytest
import torch

from linattn import linear_attention
from linattn.testing import Case, make_inputs
from test_against_reference import KINDS, fast, kinds


@kinds
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(kind, packed):
    lengths = (30, 0, 40) if packed else None
    case = Case(N=70, state=True, lengths=lengths, dtype=torch.float32, **KINDS[kind])
    x, o = make_inputs(case).tensors, make_inputs(case).options
    x = {n: t.requires_grad_() for n, t in x.items()}
    shared = (None, x["initial_state"], o.get("cu_seqlens"), o.get("scale", 0.4))
    arguments = (x["q"], x["k"], x["v"], x.get("log_decay"))
    if case.delta:
        torch.library.opcheck(
            torch.ops.linattn.chunked_delta.default, (*arguments, x["beta"], *shared)
        )
    else:
        kernel = (case.bias, case.normalize, case.causal)
        torch.library.opcheck(
            torch.ops.linattn.chunked_additive.default, (*arguments, *shared, *kernel)
        )


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


def test_second_derivatives_are_refused_or_right():
    """Case E4."""
    case = Case(N=4, Dk=2, Dv=2, B=1, heads=(1, 1, 1), decay="token")
    x = [t.requires_grad_() for t in make_inputs(case).tensors.values()]
    (grad,) = torch.autograd.grad(linear_attention(*x).square().sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match='use backend="reference"'):
        torch.autograd.grad(grad.sum(), x[0])
    assert torch.autograd.gradgradcheck(lambda *t: linear_attention(*t, backend="reference"), x)


@fast
@kinds
def test_saved_for_backward_are_inputs_and_states_of_linear_size(backend, kind):
    """Design 3: at most N * Dv numbers a head beside the inputs."""
    N, D = 1000, 32
    inputs = make_inputs(Case(N=N, Dk=D, Dv=D, dtype=torch.float32, **KINDS[kind]))
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items()}
    own = {x.data_ptr() for x in leaves.values()}
    kept = {}
    pack = lambda t: kept.setdefault(t.data_ptr(), t.numel()) and t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        inputs.call(backend)
    assert sum(n for where, n in kept.items() if where not in own) <= 2 * 2 * N * D


def test_import_needs_torch_alone():
    """Case E8: no Triton, no transformers, nothing of the command line."""
    code = (
        "import sys, torch; before = set(sys.modules); import linattn, linattn.layers; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new & {'triton', 'transformers', 'typer', 'rich', 'matplotlib', 'psutil'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
