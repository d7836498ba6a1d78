"""The Triton kernels against the token loop: interpreted, or on a GPU where there is one."""

import pytest
import torch

from linattn import backends, linear_attention
from linattn.testing import Case, compare, make_inputs, nan_filled_empties, relative_error
from operator_calls import DECAYED, KINDS, TRITON_DEVICE, kinds

pytestmark = pytest.mark.skipif(
    not backends()["triton"].available, reason=backends()["triton"].reason
)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def on_device(kind, **options):
    case = Case(**{"B": 1, "dtype": F32, **KINDS[kind], **options})
    return make_inputs(case).to(TRITON_DEVICE)


def check(kind, **options):
    inputs = make_inputs(Case(**{"B": 1, "dtype": F32, **KINDS[kind], **options}))
    with nan_filled_empties():
        wrong = compare(inputs, "triton")
    assert not wrong, "\n".join(wrong)


@kinds
def test_ragged_lengths_and_grouped_heads(kind):
    check(kind, N=70, B=2, heads=(1, 2, 1), state=True)
    check(kind, N=64, heads=(1, 1, 1), mask=True)


@kinds
@pytest.mark.parametrize("N", [0, 1])
def test_no_token_and_one(kind, N):
    check(kind, N=N, B=2, state=True)
    check(kind, N=N)


@kinds
def test_packed_sequences(kind):
    """Case D8, with empty sequences and a mask among them."""
    check(kind, lengths=(5, 0, 70, 1), heads=(1, 1, 1), state=True, mask=True)


@kinds
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sixteen_bits(kind, dtype):
    case = {"N": 80, "B": 1, "Dk": 32, "Dv": 24, "heads": (1, 1, 1), "state": True, "dtype": dtype}
    inputs = make_inputs(Case(**{**case, **KINDS[kind]}))
    g = inputs.tensors.get("log_decay")
    if g is not None and g.dim() == 1:
        # One number is the sum of all tokens', of both signs: nothing to hold a tolerance against.
        inputs.tensors["log_decay"] = g.expand(1, 80, 1).contiguous()
    wrong = compare(inputs, "triton")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["affine token", "channel", "delta channel"])
@pytest.mark.parametrize(("Dk", "Dv"), [(1, 1), (40, 70), (96, 33), (128, 64), (256, 20)])
def test_sizes(kind, Dk, Dv):
    """Case D22: no power of two, no multiple of anything, Dk other than Dv."""
    check(kind, N=20, Dk=Dk, Dv=Dv, heads=(1, 1, 1))


@pytest.mark.parametrize("kind", DECAYED)
def test_strong_decays_and_resets(kind):
    """Cases D9 and D10: down to -inf, and all of it at -30."""
    check(kind, N=70, strength=1000.0, heads=(1, 1, 1), state=True)
    check(kind, N=70, reset=True, heads=(1, 1, 1), state=True)
    inputs = make_inputs(Case(**{**KINDS[kind], "B": 1, "N": 20, "dtype": F32, "Dk": 6}))
    inputs.tensors["log_decay"].fill_(-30.0)
    if inputs.tensors["log_decay"].dim() == 4:  # a strong channel beside a weak one
        inputs.tensors["log_decay"][..., 1] = -0.01
    assert not compare(inputs, "triton")


@pytest.mark.parametrize("kind", ["plain", "channel", "delta token"])
def test_three_hundred_tokens(kind):
    check(kind, N=300, heads=(1, 1, 1), Dk=16, Dv=16)


def test_alike_keys_under_the_delta_rule():
    """The system's powers grow to 1e18 there; substitution does not see them."""
    inputs = make_inputs(Case(N=64, B=1, heads=(1, 1, 1), delta=True, dtype=F32))
    inputs.tensors["k"][:] = inputs.tensors["k"][:, :1]
    inputs.tensors["beta"].fill_(1.0)
    assert not compare(inputs, "triton")


@kinds
def test_bfloat16_sums_are_float32(kind):
    """A sum kept in bfloat16 would be off by 1e-2; the inputs' and weights' rounding is less."""
    inputs = on_device(kind, N=128, heads=(1, 1, 1), dtype=BF16, Dk=32, Dv=32)
    o = inputs.call("triton")[0].double()
    exact = inputs.double().call("reference")[0]
    assert relative_error(o, exact) < 6e-3


@pytest.mark.parametrize("kind", ["affine token", "channel", "delta token"])
def test_strides_change_no_bit(kind):
    """Case D21."""
    inputs = on_device(kind, N=66)
    plain, _ = inputs.call("triton")
    for name, x in inputs.tensors.items():
        inputs.tensors[name] = x.transpose(1, -1).contiguous().transpose(1, -1)
    assert torch.equal(inputs.call("triton")[0], plain)
    for name, x in inputs.tensors.items():
        inputs.tensors[name] = x.repeat_interleave(2, dim=-1)[..., ::2]
    assert torch.equal(inputs.call("triton")[0], plain)


@pytest.mark.parametrize("kind", ["affine token", "channel", "delta channel"])
def test_what_is_masked_does_not_matter(kind):
    """Case D7, to the bit."""
    inputs = on_device(kind, N=70, mask=True)
    first = inputs.call("triton")
    here = inputs.options["mask"]
    for name, x in inputs.tensors.items():
        inputs.tensors[name] = torch.where(here.view(1, -1, *[1] * (x.dim() - 2)), x, torch.nan)
    second = inputs.call("triton")
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert (second[0][~here] == 0).all()


def test_pieces_equal_the_whole():
    """Case D4, the last pieces single tokens."""
    inputs = on_device("delta channel", N=70)
    o, state = inputs.call("triton")
    S, found = None, []
    for i, j in ((0, 37), (37, 68), (68, 69), (69, 70)):
        some = {name: x[:, i:j] for name, x in inputs.tensors.items()}
        o_, S = linear_attention(**some, initial_state=S, return_state=True, backend="triton")
        found.append(o_)
    torch.testing.assert_close(torch.cat(found, 1), o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(S, state, rtol=1e-4, atol=1e-5)


def test_what_the_kernels_do_not_take_is_refused():
    x = torch.zeros(1, 4, 1, 8, device=TRITON_DEVICE)
    with pytest.raises(TypeError, match=r"q: got torch.float64; expected with backend=\"triton\""):
        linear_attention(x.double(), x.double(), x.double(), backend="triton")
    wide = torch.zeros(1, 4, 1, 257, device=TRITON_DEVICE)
    with pytest.raises(ValueError, match=r"q: got 257 channels; expected Dk and Dv up to 256"):
        linear_attention(x, x, wide, backend="triton")
    many = torch.zeros(1, 2, 65536, 1, device=TRITON_DEVICE)
    with pytest.raises(ValueError, match="heads: got 65536; expected up to 65535"):
        linear_attention(many, many, many, backend="triton")
