"""The chunked backend with so little work space that every call takes many segments and blocks."""

import pytest
import torch

from linattn.chunked import layout
from linattn.testing import Case, make_inputs
from operator_calls import KINDS, check, kinds


@pytest.fixture(params=[1, 4000, 16_000], autouse=True)
def _small_work_space(request, monkeypatch):
    """1: a chunk at a time, a row at a time; then a few of each."""
    monkeypatch.setattr(layout, "WORKSPACE", request.param)


@kinds
def test_many_segments(kind):
    check("chunked", N=300, B=3, state=True, mask=True, **KINDS[kind])
    check("chunked", N=257, B=1, heads=(2, 1, 2), **KINDS[kind])


@kinds
@pytest.mark.parametrize(
    "lengths", [(200, 5, 0, 130, 64, 1), (1, 1, 320, 1), (64, 64, 65, 63), (1,) * 70, (256,)]
)
def test_many_packed_segments(kind, lengths):
    for state in (False, True):
        check("chunked", lengths=lengths, state=state, heads=(1, 1, 2), **KINDS[kind])


def test_segments_that_begin_inside_a_sequence_fit_what_is_saved():
    for lengths in [(200, 5, 0, 130, 64, 1), (64, 64, 64, 64, 1), (1, 500, 2), (129,) * 5]:
        q = make_inputs(Case(lengths=lengths)).tensors["q"]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        cut = layout.Layout(q, q, 2, None, bounds)
        (segments,) = cut.segments()
        saved = [s.saved_at for s in segments if s.saved_at is not None]
        assert saved == list(range(len(saved)))
        assert len(saved) <= layout.count_saved_states(sum(lengths), 2, 5, 5)
        assert sum(s.chunks for s in segments) == sum(-(-n // cut.C) for n in lengths)
