"""selective_scan: every backend against the token loop, its neighbours, and itself in pieces."""

from itertools import pairwise

import pytest
import torch

from linattn import linear_attention, selective_scan
from linattn.testing import TOLERANCE, nan_filled_empties, relative_error
from operator_calls import any_backend, fast
from scan_calls import EVERYTHING, make, run


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
@pytest.mark.parametrize("N", [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 150])
@pytest.mark.parametrize("n", [1, 4, 16, 19])
def test_lengths_and_states(backend, N, n):
    check(backend, N=N, n=n)


@fast
@pytest.mark.parametrize("E", [1, 15, 16, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_channels_and_dtypes(backend, E, dtype):
    check(backend, E=E, dtype=dtype, n=16)


@fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_float32(backend, dtype):
    check(backend, dtype=dtype, wide=True, n=16)


@fast
@pytest.mark.parametrize("given", [(), *((name,) for name in EVERYTHING), EVERYTHING])
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_options(backend, given, softplus, mask):
    check(backend, given=given, softplus=softplus, mask=mask)


@fast
@pytest.mark.parametrize("lengths", [(5, 1, 0, 70, 3, 0), (0, 0), (2,), (16, 16, 32), (1,) * 40])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_packed(backend, lengths, state, mask):
    check(backend, lengths=lengths, mask=mask, given=EVERYTHING if state else EVERYTHING[:3])


@fast
def test_long_in_float32(backend):
    """Errors do not grow with the length."""
    check(backend, N=3000, B=1, E=3, n=16, dtype=torch.float32)


@any_backend
def test_decays_of_every_size(backend):
    """No decay, decays to nothing in one step, and step sizes of 1e-4 and 50."""
    tensors, options = make(softplus=False, given=(), n=3)
    A = torch.tensor([0.0, -1.0, -1e4], dtype=torch.float64).expand(5, 3).contiguous()
    tensors["A"] = A
    tensors["dt"] = torch.tensor([1e-4, 1.0, 50.0, 0.0, 3.0], dtype=torch.float64).expand(2, 40, 5)
    expected = run(tensors, options, "reference")
    for dtype in (torch.float64, torch.float32):
        got = run({name: x.to(dtype) for name, x in tensors.items()}, options, backend)
        for name, x in expected.items():
            assert x.isfinite().all()
            assert relative_error(got[name], x) <= 3 * TOLERANCE[dtype], name


@any_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_at_its_ends(backend, dtype):
    """Relative accuracy where it is exp(x), and x itself where that is large."""
    dt = torch.tensor([-80.0, -30, -15, -5, -1e-3, 0, 1e-3, 2, 19, 21, 500], dtype=dtype)
    one = torch.ones(1, 1, 11, dtype=dtype)
    zeros, ones = torch.zeros(11, 1, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
    o = selective_scan(one, dt[None, None], zeros, ones, ones, dt_softplus=True, backend=backend)
    expected = torch.logaddexp(dt.double(), torch.zeros(11).double())
    torch.testing.assert_close(o[0, 0].double(), expected, rtol=2e-6, atol=0)


@any_backend
def test_alike_in_all_states_it_is_linear_attention(backend):
    """Mamba-2's case: one decay a head of channels."""
    tensors, _ = make(given=(), softplus=False, E=6, n=4)
    x, dt, B, C = (tensors[name] for name in ("x", "dt", "B", "C"))
    dt = dt[..., :1].expand_as(dt)
    A = torch.full((6, 4), -0.7, dtype=torch.float64)
    o = selective_scan(x, dt, A, B, C, backend=backend)
    expected = linear_attention(
        C[:, :, None], B[:, :, None], (dt * x)[:, :, None], (-0.7 * dt[..., :1]), scale=1.0
    )
    torch.testing.assert_close(o, expected[:, :, 0])


@any_backend
@pytest.mark.parametrize("cuts", [(1, 95), (37, 59), (48, 48), (95, 1), (1,) * 96, (2, 1, 90, 3)])
def test_d4_pieces_equal_the_whole(backend, cuts):
    tensors, options = make(N=96)
    o, state = selective_scan(**tensors, **options, return_state=True, backend=backend)
    S, outputs = tensors.pop("initial_state"), []
    pieces = {name: tensors.pop(name).split(cuts, dim=1) for name in ("x", "dt", "B", "C", "z")}
    for i in range(len(cuts)):
        o_, S = selective_scan(
            **{name: y[i] for name, y in pieces.items()}, **tensors, **options,
            initial_state=S, return_state=True, backend=backend,
        )  # fmt: skip
        outputs.append(o_)
    torch.testing.assert_close(torch.cat(outputs, 1), o)
    torch.testing.assert_close(S, state)


@any_backend
def test_d8_packed_equals_separate(backend):
    lengths = (5, 1, 70, 3)
    tensors, options = make(lengths=lengths)
    packed, state = selective_scan(**tensors, **options, return_state=True, backend=backend)
    bounds = options.pop("cu_seqlens").tolist()
    for i, (start, stop) in enumerate(pairwise(bounds)):
        own = {
            name: x[:, start:stop] if x.dim() == 3 and name != "initial_state" else x
            for name, x in tensors.items()
        }
        own["initial_state"] = tensors["initial_state"][i : i + 1]
        o, S = selective_scan(**own, **options, return_state=True, backend=backend)
        torch.testing.assert_close(o, packed[:, start:stop])
        torch.testing.assert_close(S[0], state[i])


@any_backend
def test_d7_what_is_masked_does_not_matter(backend):
    tensors, options = make(mask=True)
    first, here = run(tensors, options, backend), options["mask"][..., None]
    for name in ("x", "dt", "B", "C", "z"):
        tensors[name] = torch.where(here, tensors[name], torch.nan)
    second = run(tensors, options, backend)
    for name, x in second.items():
        assert torch.equal(x, first[name]), name
    for name in ("o", "dx", "ddt", "dB", "dC", "dz"):
        assert (second[name][~options["mask"]] == 0).all(), name


@any_backend
@pytest.mark.parametrize("N", [1, 2, 3, 20])
def test_out_state(backend, N):
    tensors, options = make(N=N)
    o, state = selective_scan(**tensors, **options, return_state=True, backend=backend)
    S = tensors["initial_state"]
    o2, found = selective_scan(
        **tensors, **options, out_state=S, return_state=True, backend=backend
    )
    assert found is S
    torch.testing.assert_close(S, state)
    torch.testing.assert_close(o2, o)


@fast
@pytest.mark.parametrize("N", [3, 40])
def test_strides(backend, N):
    """[B, E, N] as Mamba has it, sliced and expanded tensors; the kernels to the bit."""
    tensors, options = make(dtype=torch.float32, N=N, E=70)
    expected = run(tensors, options, backend)
    for name, x in tensors.items():
        layouts = [torch.stack([x] * 2, -1)[..., 0]]
        if x.dim() > 1:
            layouts.append(x.transpose(-1, -2).contiguous().transpose(-1, -2))
        for layout in layouts:
            for key, y in run({**tensors, name: layout}, options, backend).items():
                if backend == "cpu":
                    assert torch.equal(y, expected[key]), (name, key)
                assert relative_error(y, expected[key]) < 1e-6, (name, key)
    one = {**tensors, "x": tensors["x"][:1].expand(2, -1, -1)}
    copied = {**tensors, "x": tensors["x"][:1].repeat(2, 1, 1)}
    assert torch.equal(run(one, options, backend)["o"], run(copied, options, backend)["o"])


@any_backend
def test_gradcheck(backend):
    tensors, options = make(N=9, E=3, n=2, mask=True)
    leaves = [x.requires_grad_() for x in tensors.values()]

    def call(*given):
        named = dict(zip(tensors, given, strict=True))
        return selective_scan(**named, **options, return_state=True, backend=backend)

    torch.autograd.gradcheck(call, leaves)


@any_backend
def test_nan_is_not_hidden(backend):
    for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state"):
        tensors, options = make(dtype=torch.float32)
        tensors[name].view(-1)[0] = torch.nan
        o, state = selective_scan(**tensors, **options, return_state=True, backend=backend)
        assert o.isnan().any(), name
        if name in ("D", "z"):
            assert not state.isnan().any()


@any_backend
@pytest.mark.parametrize("lengths", [(5, 20), (16, 16), (3, 64, 40), (40, 3, 21)])
@pytest.mark.parametrize("where", ["first", "last"])
def test_nan_stays_in_its_packed_sequence(backend, lengths, where):
    """Forward and backward, whatever is multiplied by 0 inside."""
    tensors, options = make(lengths=lengths)
    wanted = run(tensors, options, backend)
    bounds = options["cu_seqlens"].tolist()
    start, stop = bounds[:2] if where == "first" else bounds[-2:]
    for name in ("x", "dt", "B", "C", "z"):
        spoilt = {**tensors, name: tensors[name].clone()}
        spoilt[name][:, (start + stop) // 2] = torch.nan
        found = run(spoilt, options, backend)
        for key in ("o", "dx", "ddt", "dB", "dC", "dz"):
            for i, j in ((0, start), (stop, bounds[-1])):
                torch.testing.assert_close(found[key][:, i:j], wanted[key][:, i:j])
        assert found["o"][:, start:stop].isnan().any()


@any_backend
def test_masked_tokens_behind_nan_have_no_gradient(backend):
    tensors, options = make(N=20, mask=True)
    options["mask"][:, 2] = True
    tensors["x"][:, 2] = torch.nan
    found = run(tensors, options, backend)
    for name in ("o", "dx", "ddt", "dB", "dC", "dz"):
        assert (found[name][~options["mask"]] == 0).all(), name


BAD = [
    ("x", {"x": [1.0]}, TypeError, r"x: got list; expected a torch.Tensor"),
    ("x shape", {"x": torch.zeros(2, 5)}, ValueError, r"x: got shape \[2, 5\].*\[Bt, N, E\]"),
    ("x dtype", {"x": torch.zeros(1, 4, 5).long()}, TypeError, r"x: got torch.int64"),
    ("dt", {"dt": torch.zeros(1, 3, 5)}, ValueError, r"dt: got shape \[1, 3, 5\]; .*\[1, 4, 5\]"),
    ("dt dtype", {"dt": torch.zeros(1, 4, 5).half()}, TypeError, r"dt: got torch.float16"),
    ("A", {"A": torch.zeros(4, 3)}, ValueError, r"A: got shape \[4, 3\].*E = 5"),
    ("no state", {"A": torch.zeros(5, 0)}, ValueError, r"A: got shape \[5, 0\].*n >= 1"),
    ("A complex", {"A": torch.zeros(5, 3, dtype=torch.complex64)}, TypeError, r"A: got torch.comp"),
    ("B", {"B": torch.zeros(1, 4, 2)}, ValueError, r"B: got shape \[1, 4, 2\]; .*\[1, 4, 3\]"),
    ("C", {"C": torch.zeros(1, 4, 1, 3)}, ValueError, r"C: got shape"),
    ("D", {"D": torch.zeros(1)}, ValueError, r"D: got shape \[1\]; .*\[5\]"),
    ("D number", {"D": 1.0}, TypeError, r"D: got float; expected a torch.Tensor"),
    ("z", {"z": torch.zeros(1, 4, 3)}, ValueError, r"z: got shape"),
    ("z dtype", {"z": torch.zeros(1, 4, 5).double()}, TypeError, r"z: got torch.float64"),
    ("bias", {"dt_bias": torch.zeros(1, 5)}, ValueError, r"dt_bias: got shape"),
    ("softplus", {"dt_softplus": 1}, TypeError, r"dt_softplus: got int 1"),
    ("mask", {"mask": torch.ones(1, 4)}, TypeError, r"mask: got torch.float32"),
    ("state", {"initial_state": torch.zeros(1, 3, 5)}, ValueError, r"\[Bt, E, n\].*\[1, 5, 3\]"),
    ("half", {"initial_state": torch.zeros(1, 5, 3).half()}, TypeError, r"initial_state: got"),
    ("out", {"out_state": torch.zeros(1, 1, 3).expand(1, 5, 3)}, ValueError, r"out_state: .*own"),
    ("packed", {"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"cu_seqlens: .*N = 4"),
    ("return_state", {"return_state": 1}, TypeError, r"return_state: got int 1"),
    ("backend", {"backend": "gpu"}, ValueError, r"backend: got 'gpu'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "kind", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
@pytest.mark.parametrize("N", [4, 40])
def test_errors_name_what_is_wrong(wrong, kind, message, N):
    good = {
        "x": torch.zeros(1, 4, 5), "dt": torch.zeros(1, 4, 5), "A": torch.zeros(5, 3),
        "B": torch.zeros(1, 4, 3), "C": torch.zeros(1, 4, 3),
    }  # fmt: skip
    with pytest.raises(kind, match=message):
        selective_scan(**{**good, **wrong})
