"""Torch around the Triton kernels: opcheck and torch.compile."""

import pytest
import torch

from convolution_calls import make
from linattn import backends, causal_conv1d, linear_attention
from linattn.testing import Case, make_inputs
from operator_calls import KINDS, TRITON_DEVICE, leaves_of
from test_torch_operators import operator_arguments

pytestmark = pytest.mark.skipif(
    not backends()["triton"].available, reason=backends()["triton"].reason
)
SOME = pytest.mark.parametrize("kind", ["affine token", "channel", "delta head", "every token"])


def inputs_of(kind, **options):
    case = {"N": 20, "B": 1, "heads": (2, 1, 2), "dtype": torch.float32, **KINDS[kind], **options}
    return make_inputs(Case(**case)).to(TRITON_DEVICE)


@SOME
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(kind, packed):
    inputs = inputs_of(kind, lengths=(7, 0, 13) if packed else None, state=packed, mask=not packed)
    name, arguments = operator_arguments(inputs, kind, "triton")
    checks = ("test_schema", "test_faketensor")
    forward = getattr(torch.ops.linattn, name).default
    torch.library.opcheck(forward, tuple(arguments), test_utils=checks)
    o, state, saved = forward(*arguments)
    backward = getattr(torch.ops.linattn, name + "_backward").default
    grads = torch.randn_like(o), torch.randn_like(state)
    torch.library.opcheck(backward, (*grads, state, saved, *arguments), test_utils=checks)
    leaves = leaves_of(inputs)
    torch.library.opcheck(forward, tuple(operator_arguments(leaves, kind, "triton")[1]))


def test_opcheck_of_the_convolution():
    tensors, options = make(N=9, C=3, dtype=torch.float32)
    leaves = {n: x.to(TRITON_DEVICE).requires_grad_() for n, x in tensors.items()}
    torch.library.opcheck(
        torch.ops.linattn.triton_convolution.default,
        (leaves["x"], leaves["weight"], leaves["bias"], options["activation"] == "silu", None,
         leaves["initial_state"], None),
    )  # fmt: skip


@SOME
def test_compiled_in_one_graph(kind):
    torch._dynamo.reset()

    def call(**tensors):
        o = linear_attention(**tensors, **inputs.options, backend="triton")
        return causal_conv1d(o.flatten(2), weight, backend="triton")

    inputs = leaves_of(inputs_of(kind))
    weight = torch.randn(14, 3, device=TRITON_DEVICE)
    leaves = list(inputs.tensors.values())
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    o, expected = compiled(**inputs.tensors), call(**inputs.tensors)
    torch.testing.assert_close(o, expected)
    upstream = torch.randn_like(o)
    for a, b in zip(
        torch.autograd.grad(o, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_decoding_step_is_compiled():
    inputs = inputs_of("delta channel", N=1, state=True)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
        found = compiled(**inputs.tensors, return_state=True, backend="triton")
        expected = linear_attention(**inputs.tensors, return_state=True, backend="triton")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
