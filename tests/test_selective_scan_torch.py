"""Torch around selective_scan: opcheck, vmap, compile, export, what is saved, decoding."""

import pytest
import torch

from linattn import selective_scan
from linattn.cpu.selective_scan import decode
from linattn.testing import TOLERANCE, relative_error
from operator_calls import fast
from scan_calls import make, run

MAPPED = [("x",), ("x", "initial_state", "mask"), ("A",), ("B", "dt_bias")]


@fast
@pytest.mark.parametrize("lengths", [None, (30, 0, 10)])
def test_opcheck(backend, lengths):
    tensors, options = make(lengths=lengths, dtype=torch.float32)
    leaves = {n: x.requires_grad_() for n, x in tensors.items()}
    state = leaves.pop("initial_state")
    bias, z, D = (leaves.pop(name) for name in ("dt_bias", "z", "D"))
    operator = getattr(torch.ops.linattn, f"{backend}_selective_scan").default
    bounds = options.get("cu_seqlens")
    torch.library.opcheck(operator, (*leaves.values(), D, z, bias, True, None, state, bounds))


@fast
@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("lengths", [None, (10, 0, 30)])
def test_vmap_equals_one_call_after_another(backend, mapped, lengths):
    calls = [make(mask=True, lengths=lengths, seed=seed) for seed in range(3)]
    first = {**calls[0][0], "mask": calls[0][1]["mask"]}
    options = {n: x for n, x in calls[0][1].items() if n != "mask"}
    stacked = {n: torch.stack([{**t, **o}[n] for t, o in calls]) for n in mapped}

    def call(given):
        return selective_scan(**{**first, **given}, **options, return_state=True, backend=backend)

    o, state = torch.vmap(call)(stacked)
    for i in range(3):
        expected_o, expected_state = call({n: x[i] for n, x in stacked.items()})
        torch.testing.assert_close(o[i], expected_o)
        torch.testing.assert_close(state[i], expected_state)


@fast
def test_refusals_of_derivatives(backend):
    tensors, options = make()
    x = tensors.pop("x").requires_grad_()
    o = selective_scan(x, **tensors, **options, backend=backend)
    (dx,) = torch.autograd.grad(o.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="reference"'):
        torch.autograd.grad(dx.sum(), x)
    with pytest.raises(NotImplementedError, match="selective_scan: forward-mode"):
        torch.func.jvp(
            lambda y: selective_scan(y, **tensors, **options, backend=backend),
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
        selective_scan(**leaves, **options, backend=backend)
    assert {x.data_ptr() for x in kept} <= own


@pytest.mark.skipif("cpu" not in fast.args[1], reason="no native kernels here")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [1, 5])
@pytest.mark.parametrize("n", [3, 16, 32])
def test_decoding_is_the_same(dtype, N, n):
    """Its kernel has the states as lanes where they fill vectors."""
    tensors, options = make(dtype=dtype, N=N, n=n, E=40, mask=True, wide=True)
    expected = run({k: x.double() for k, x in tensors.items()}, options, "reference")
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    rest = (True, options["mask"], tensors["initial_state"])
    o, S = decode(*(tensors[name] for name in names), *rest, None)
    assert relative_error(o.double(), expected["o"]) <= TOLERANCE[dtype]
    assert relative_error(S.double(), expected["state"]) <= TOLERANCE[S.dtype]
    own = tensors["initial_state"]
    version = own._version
    _, found = decode(*(tensors[name] for name in names), *rest, own)
    assert found is own
    assert torch.equal(own, S)
    assert own._version > version
    tensors["x"].requires_grad_()
    assert decode(*(tensors[name] for name in names), *rest, None) is None


@fast
def test_same_bits_again_and_on_one_thread(backend):
    tensors, options = make(B=1, N=300, E=200, n=16, dtype=torch.float32)
    first = selective_scan(**tensors, **options, backend=backend)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(selective_scan(**tensors, **options, backend=backend), first)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(selective_scan(**tensors, **options, backend=backend), first)


@pytest.mark.slow
def test_compile_and_export():
    A = -torch.rand(5, 4)

    class Layer(torch.nn.Module):
        def forward(self, x, B):
            return selective_scan(x, x, A, B, B, dt_softplus=True, z=x)

    x, B = torch.randn(2, 30, 5), torch.randn(2, 30, 4)
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, B), Layer()(x, B))
    length = {1: torch.export.Dim("N", min=2, max=4096)}
    exported = torch.export.export(Layer(), (x, B), dynamic_shapes=(length, length)).module()
    x, B = torch.randn(2, 333, 5), torch.randn(2, 333, 4)
    torch.testing.assert_close(exported(x, B), Layer()(x, B))
    with torch.autocast("cpu", torch.bfloat16):
        assert Layer()(x, B).dtype == torch.float32
