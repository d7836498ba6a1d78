"""One long sequence on several threads: the parts give what the whole gives."""

from dataclasses import replace

import pytest
import torch

from linattn import backends, linear_attention
from linattn.testing import Case, compare, make_inputs, nan_filled_empties, relative_error, run
from operator_calls import KINDS

pytestmark = pytest.mark.skipif(
    not backends()["cpu"].available, reason="the native kernels are not built"
)


@pytest.fixture
def threads():
    """Let a test set the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "heads", "N"), [(2, (1, 1, 1), 2100), (5, (2, 1, 2), 5003)])
@pytest.mark.parametrize("mask", [False, True])
def test_parts_equal_the_whole(threads, kind, count, heads, N, mask):
    """Values, states and gradients, from 1 thread to several, and both against `chunked`."""
    inputs = make_inputs(
        Case(N=N, B=1, Dk=5, Dv=7, heads=heads, state=True, mask=mask, **KINDS[kind])
    )
    threads(1)
    whole = run(inputs, "cpu")
    chunked = run(inputs, "chunked")
    threads(count)
    with nan_filled_empties():
        parts = run(inputs, "cpu")
        again = run(inputs, "cpu")
    for name, x in whole.items():
        assert relative_error(parts[name], x) < 1e-11, name
        assert relative_error(parts[name], chunked[name]) < 1e-10, name
        assert torch.equal(parts[name], again[name])  # bitwise, at a fixed number of threads


@pytest.mark.parametrize("decay", [None, "token", "channel", "every token"])
def test_two_threads_share_one_sequence(threads, decay):
    """The sums are taken in parts: another order, so other last bits, in the forward and back."""
    case = Case(N=8192, B=1, heads=(1, 1, 1), dtype=torch.float32)
    if decay == "every token":
        case = replace(case, causal=False)
    else:  # so weak that the first part is felt in the second
        case = replace(case, decay=decay, strength=1e-3)
    inputs = make_inputs(case)
    threads(1)
    whole = run(inputs, "cpu")
    threads(2)
    parts = run(inputs, "cpu")
    for name in ("o", "state", "dq", "dk", "dv"):
        assert not torch.equal(parts[name], whole[name]), name


@pytest.mark.parametrize("kind", ["plain", "token", "channel", "affine", "affine unnormalised"])
def test_float32_parts_against_the_reference(threads, kind):
    threads(4)
    inputs = make_inputs(
        Case(N=4200, B=1, Dk=8, Dv=8, heads=(1, 1, 1), dtype=torch.float32, **KINDS[kind])
    )
    wrong = compare(inputs, "cpu")
    assert not wrong, "\n".join(wrong)


def test_resets_and_batch_rows(threads):
    """Several rows, one head, more threads than both; decays of -inf in every part."""
    threads(7)
    inputs = make_inputs(
        Case(N=4100, B=3, Dk=5, Dv=5, heads=(1, 1, 1), decay="channel", reset=True, state=True)
    )
    parts = run(inputs, "cpu")
    for name, x in run(inputs, "chunked").items():
        assert relative_error(parts[name], x) < 1e-10, name


def test_later_tokens_change_no_earlier_bit(threads):
    threads(2)
    inputs = make_inputs(Case(N=4096, B=1, heads=(1, 1, 1), decay="token", dtype=torch.float32))
    o, _ = inputs.call("cpu")
    cut = 2500
    for x in inputs.tensors.values():
        x[:, cut:] *= 0.5
    o2, _ = inputs.call("cpu")
    assert torch.equal(o[:, :cut], o2[:, :cut])
    assert not torch.equal(o[:, cut:], o2[:, cut:])


@pytest.mark.parametrize("count", [1, 2])
def test_a_long_sum_does_not_swallow_its_terms(threads, count):
    """Chunks are summed first and then added: one term at a time would lose 2e-5 here."""
    threads(count)
    q = torch.rand(1, 200_000, 1, 4, generator=torch.Generator().manual_seed(0))
    o, state = linear_attention(q, q, q, scale=1.0, return_state=True, backend="cpu")
    exact = q.double()[0, :, 0]
    sums = (exact[:, :, None] * exact[:, None, :]).cumsum(0)
    assert relative_error(state[0, 0].double(), sums[-1]) < 3e-6
    assert relative_error(o[0, :, 0].double(), torch.einsum("nd,nde->ne", exact, sums)) < 3e-6
