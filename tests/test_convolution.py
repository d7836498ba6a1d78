"""causal_conv1d: every backend against the token loop, torch's conv1d, and itself in pieces."""

from itertools import pairwise

import pytest
import torch

from convolution_calls import make, run
from linattn import causal_conv1d
from linattn.testing import TOLERANCE, nan_filled_empties, relative_error
from operator_calls import any_backend, fast


def check(backend, **options):
    tensors, call = make(**options)
    expected = run({n: x.double() for n, x in tensors.items()}, call, "reference")
    with nan_filled_empties():
        got = run(tensors, call, backend)
    dtype = tensors["x"].dtype
    for name, x in expected.items():
        assert got[name].shape == x.shape, name
        allowed = TOLERANCE[dtype] * (3 if name.startswith("d") else 1)
        assert relative_error(got[name], x) <= allowed, name


@fast
@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("N", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("silu", [False, True])
def test_taps_and_lengths(backend, W, N, silu):
    """Sequences shorter than the window pass part of the state on."""
    check(backend, W=W, N=N, silu=silu)


@fast
@pytest.mark.parametrize("C", [1, 3, 16, 255, 256, 257, 600])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_channels_and_dtypes(backend, C, dtype):
    check(backend, C=C, dtype=dtype)


@fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_float32(backend, dtype):
    check(backend, dtype=dtype, weight_dtype=torch.float32)


@fast
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("lengths", [None, (5, 1, 0, 70, 3, 0), (0, 0), (2,)])
def test_options(backend, bias, state, mask, lengths):
    check(backend, bias=bias, state=state, mask=mask, lengths=lengths)


@fast
@pytest.mark.parametrize("lengths", [None, (1500, 1, 600), (1,) * 300 + (1200,)])
def test_longer_than_a_task(backend, lengths):
    """Tasks of 512 tokens hand windows and gradients to each other."""
    check(backend, N=1700, lengths=lengths, C=3, mask=True)


@any_backend
@pytest.mark.parametrize("W", [1, 2, 4, 8])
def test_is_torchs_conv1d(backend, W):
    tensors, _ = make(W=W, state=False)
    x, weight, bias = tensors["x"], tensors["weight"], tensors["bias"]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (W - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[2])
    o = causal_conv1d(x, weight, bias, backend=backend)
    torch.testing.assert_close(o, expected.transpose(1, 2))
    o = causal_conv1d(x, weight, bias, activation="silu", backend=backend)
    torch.testing.assert_close(o, torch.nn.functional.silu(expected).transpose(1, 2))


@any_backend
@pytest.mark.parametrize("cuts", [(1, 95), (37, 59), (48, 48), (95, 1), (1,) * 96, (2, 1, 90, 3)])
def test_d4_pieces_equal_the_whole(backend, cuts):
    tensors, options = make(N=96)
    o, state = causal_conv1d(**tensors, **options, return_state=True, backend=backend)
    S, outputs, x = tensors.pop("initial_state"), [], tensors.pop("x")
    for piece in x.split(cuts, dim=1):
        o_, S = causal_conv1d(
            piece, **tensors, **options, initial_state=S, return_state=True, backend=backend
        )
        outputs.append(o_)
    torch.testing.assert_close(torch.cat(outputs, 1), o)
    assert torch.equal(S, state)
    assert torch.equal(S, x[:, -3:])


@any_backend
def test_d8_packed_equals_separate(backend):
    lengths = (5, 1, 70, 3)
    tensors, options = make(lengths=lengths)
    packed, state = causal_conv1d(**tensors, **options, return_state=True, backend=backend)
    bounds = options.pop("cu_seqlens").tolist()
    for i, (start, stop) in enumerate(pairwise(bounds)):
        own = {**tensors, "x": tensors["x"][:, start:stop]}
        own["initial_state"] = tensors["initial_state"][i : i + 1]
        o, S = causal_conv1d(**own, **options, return_state=True, backend=backend)
        torch.testing.assert_close(o, packed[:, start:stop])
        assert torch.equal(S[0], state[i])


@any_backend
def test_d7_what_is_masked_does_not_matter(backend):
    tensors, options = make(mask=True)
    first = run(tensors, options, backend)
    tensors["x"] = torch.where(options["mask"][..., None], tensors["x"], torch.nan)
    for name, x in run(tensors, options, backend).items():
        assert torch.equal(x, first[name]), name
    assert (first["o"][~options["mask"]] == 0).all()
    assert (first["dx"][~options["mask"]] == 0).all()


@any_backend
@pytest.mark.parametrize("N", [1, 2, 3, 20])
def test_out_state(backend, N):
    tensors, options = make(N=N)
    o, state = causal_conv1d(**tensors, **options, return_state=True, backend=backend)
    S = tensors["initial_state"]
    o2, found = causal_conv1d(**tensors, **options, out_state=S, return_state=True, backend=backend)
    assert found is S
    assert torch.equal(S, state)
    assert torch.equal(o2, o)


@fast
def test_strides(backend):
    """[B, C, N] as a convolution of torch has it, expanded and sliced tensors: the same bits."""
    tensors, options = make(dtype=torch.float32, B=3)
    expected = run(tensors, options, backend)
    x = tensors["x"]
    layouts = {
        "x": x.transpose(1, 2).contiguous().transpose(1, 2),
        "weight": tensors["weight"].t().contiguous().t(),
        "bias": torch.stack([tensors["bias"]] * 2, 1)[:, 0],
        "initial_state": tensors["initial_state"].transpose(1, 2).contiguous().transpose(1, 2),
    }
    for name, layout in layouts.items():
        for key, y in run({**tensors, name: layout}, options, backend).items():
            assert torch.equal(y, expected[key]), (name, key)
    one = {**tensors, "x": x[:1].expand(3, -1, -1)}
    copied = {**tensors, "x": x[:1].repeat(3, 1, 1)}
    assert torch.equal(run(one, options, backend)["o"], run(copied, options, backend)["o"])


@any_backend
def test_gradcheck(backend):
    tensors, options = make(N=9, C=3, mask=True)
    leaves = [x.requires_grad_() for x in tensors.values()]

    def call(*given):
        named = dict(zip(tensors, given, strict=True))
        return causal_conv1d(**named, **options, return_state=True, backend=backend)

    torch.autograd.gradcheck(call, leaves)


@fast
def test_later_tokens_change_no_earlier_bit(backend):
    tensors, options = make(N=1200, dtype=torch.float32)
    o = causal_conv1d(**tensors, **options, backend=backend)
    tensors["x"][:, 700:] = torch.nan
    o2 = causal_conv1d(**tensors, **options, backend=backend)
    assert torch.equal(o[:, :700], o2[:, :700])
    assert o2[:, 700:].isnan().all()


BAD = [
    ("x", {"x": [1.0]}, TypeError, r"x: got list; expected a torch.Tensor"),
    ("x shape", {"x": torch.zeros(2, 5)}, ValueError, r"x: got shape \[2, 5\].*\[B, N, C\]"),
    ("x dtype", {"x": torch.zeros(1, 4, 5, dtype=torch.int64)}, TypeError, r"x: got torch.int64"),
    ("weight 3d", {"weight": torch.zeros(5, 1, 4)}, ValueError, r"weight: .*squeeze\(1\)"),
    ("taps", {"weight": torch.zeros(5, 9)}, ValueError, r"weight: got shape \[5, 9\].*W <= 8"),
    ("no taps", {"weight": torch.zeros(5, 0)}, ValueError, r"weight: got shape \[5, 0\]"),
    ("weight C", {"weight": torch.zeros(4, 4)}, ValueError, r"weight: .*C = 5"),
    ("weight dtype", {"weight": torch.zeros(5, 4).double()}, TypeError, r"weight: got torch.float"),
    ("bias", {"bias": torch.zeros(4)}, ValueError, r"bias: got shape \[4\]; .*\[C\] = \[5\]"),
    ("bias dtype", {"bias": torch.zeros(5).half()}, TypeError, r"bias: got torch.float16"),
    ("activation", {"activation": "relu"}, ValueError, r"activation: got 'relu'"),
    ("mask", {"mask": torch.ones(1, 4)}, TypeError, r"mask: got torch.float32"),
    ("mask shape", {"mask": torch.ones(1, 5).bool()}, ValueError, r"mask: got shape"),
    ("state", {"initial_state": torch.zeros(1, 4, 5)}, ValueError, r"\[B, W - 1, C\].*\[1, 3, 5\]"),
    ("state dtype", {"initial_state": torch.zeros(1, 3, 5).half()}, TypeError, r"initial_state"),
    ("out", {"out_state": torch.zeros(1, 1, 5).expand(1, 3, 5)}, ValueError, r"out_state: .*own"),
    ("packed", {"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"cu_seqlens: .*N = 4"),
    ("return_state", {"return_state": 1}, TypeError, r"return_state: got int 1"),
    ("backend", {"backend": "gpu"}, ValueError, r"backend: got 'gpu'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "kind", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
def test_errors_name_what_is_wrong(wrong, kind, message):
    good = {"x": torch.zeros(1, 4, 5), "weight": torch.zeros(5, 4)}
    with pytest.raises(kind, match=message):
        causal_conv1d(**{**good, **wrong})
