"""The Triton convolution against the token loop."""

import pytest
import torch

from convolution_calls import make, run
from linattn import backends, causal_conv1d, selective_scan
from linattn.testing import TOLERANCE, nan_filled_empties, relative_error
from operator_calls import TRITON_DEVICE

pytestmark = pytest.mark.skipif(
    not backends()["triton"].available, reason=backends()["triton"].reason
)


def check(**options):
    tensors, call = make(**{"dtype": torch.float32, **options})
    expected = run({n: x.double() for n, x in tensors.items()}, call, "reference")
    with nan_filled_empties():
        got = run(tensors, call, "triton")
    dtype = tensors["x"].dtype
    for name, x in expected.items():
        assert got[name].shape == x.shape, name
        allowed = TOLERANCE[dtype] * (3 if name.startswith("d") else 1)
        assert relative_error(got[name], x) <= allowed, name


@pytest.mark.parametrize("W", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("N", [0, 1, 3, 70])
def test_taps_and_lengths(W, N):
    check(W=W, N=N, silu=bool(N % 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [None, torch.float32])
def test_sixteen_bits(dtype, wide):
    check(dtype=dtype, weight_dtype=wide, C=70)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("lengths", [None, (5, 1, 0, 70, 3, 0), (0, 0)])
def test_options(bias, state, mask, lengths):
    check(bias=bias, state=state, mask=mask, lengths=lengths)


def test_strides():
    tensors, options = make(dtype=torch.float32, N=40, C=70)
    expected = run(tensors, options, "triton")
    for name, x in tensors.items():
        other = x.transpose(-1, 0).contiguous().transpose(-1, 0) if x.dim() > 1 else x[::1]
        for key, y in run({**tensors, name: other}, options, "triton").items():
            assert torch.equal(y, expected[key]), (name, key)


def test_what_the_kernels_do_not_take_is_refused():
    x, weight = (torch.zeros(*s, dtype=torch.float64) for s in ((1, 4, 3), (3, 4)))
    x, weight, A, B = (
        y.to(TRITON_DEVICE) for y in (x, weight, torch.zeros(3, 2), torch.zeros(1, 4, 2))
    )
    with pytest.raises(TypeError, match=r"x: got torch\.float64"):
        causal_conv1d(x, weight, backend="triton")
    x = x.float()
    with pytest.raises(ValueError, match=r"backend: got .triton.; .*no selective scan"):
        selective_scan(x, x, A, B, B, backend="triton")
