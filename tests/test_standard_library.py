"""The byte corpus: what it holds, how it is split, and the baseline on it."""

import math

import pytest
import torch

from linattn.tasks import standard_library
from linattn.tasks.standard_library import batch, bigram_entropy, load, source_files, spread


def as_tensor(text: bytes):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path):
    """Twelve files, each of its own letter, and files that are no part of the corpus."""
    for i in range(12):
        (tmp_path / f"{i:02}.py").write_text(chr(ord("a") + i) * (10 + i))
    for name in ("site-packages", "test", "encodings"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "no.py").write_text("Z" * 50)
    (tmp_path / "no.txt").write_text("Z" * 50)
    return tmp_path


def test_every_file_is_in_one_half_of_the_split_and_only_there(folder):
    corpus = load(folder, held_out_every=4)
    letters = [set(bytes(x.tolist())) - {ord("\n")} for x in (corpus.train, corpus.held_out)]
    assert letters[1] == set(b"dhl")  # the 4th, 8th and 12th
    assert letters[0] == set(b"abcefgijk")
    assert bytes(corpus.held_out.tolist()) == b"d" * 13 + b"\n" + b"h" * 17 + b"\n" + b"l" * 21


def test_the_split_is_the_same_every_time(folder):
    a, b = load(folder), load(folder)
    assert torch.equal(a.train, b.train)
    assert torch.equal(a.held_out, b.held_out)


def test_the_standard_library_is_there():
    corpus = load()
    assert corpus.train.dtype == corpus.held_out.dtype == torch.uint8
    assert corpus.train.numel() > 5 * corpus.held_out.numel() > 1_000_000
    assert b"def " in bytes(corpus.held_out[:20_000].tolist())


def test_installed_packages_are_not_part_of_it(folder):
    assert [path.name for path in source_files(folder)] == [f"{i:02}.py" for i in range(12)]


@pytest.mark.parametrize("files", [0, 1, 9])
def test_too_few_files_are_refused(tmp_path, files):
    for i in range(files):
        (tmp_path / f"{i}.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"folder: got .*expected more \.py files"):
        load(tmp_path)


def test_a_split_that_trains_on_nothing_is_refused(folder):
    with pytest.raises(ValueError, match="held_out_every: got 1; expected"):
        load(folder, held_out_every=1)


def test_bigram_entropy_by_hand():
    # Pairs of abacab: ab, ba, ac, ca, ab. After a: b twice, c once; after b and c: always a.
    expected = 3 / 5 * (2 / 3 * math.log2(3 / 2) + 1 / 3 * math.log2(3))
    assert bigram_entropy(as_tensor(b"abacab")) == pytest.approx(expected, abs=1e-12)
    assert bigram_entropy(as_tensor(b"aaaa")) == 0.0


def test_bigrams_do_not_cross_rows():
    rows = as_tensor(b"abbaabba").view(4, 2)  # ab, ba, ab, ba: the second byte is certain
    assert bigram_entropy(rows) == 0.0
    assert bigram_entropy(rows.flatten()) > 0.5


def test_bigram_entropy_of_uniform_bytes_is_near_eight():
    text = torch.randint(256, (4_000_000,), generator=torch.Generator().manual_seed(0))
    assert 7.9 < bigram_entropy(text) < 8.0


@pytest.mark.parametrize("text", [b"", b"a"])
def test_bigram_entropy_needs_a_pair(text):
    with pytest.raises(ValueError, match=r"text: got shape .*N >= 2"):
        bigram_entropy(torch.tensor(list(text), dtype=torch.uint8))


def test_batches_are_windows_of_the_text_and_follow_the_seed():
    text = as_tensor(bytes(range(256)))
    a, b, c = (batch(text, 64, 9, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.shape == (64, 10)
    assert a.dtype == torch.int64
    assert torch.equal(a - a[:, :1], torch.arange(10).expand(64, 10))


def test_batches_reach_both_ends():
    text = as_tensor(b"abc")
    found = batch(text, 100, 1, torch.Generator().manual_seed(0)).unique(dim=0)
    assert found.tolist() == [[97, 98], [98, 99]]


@pytest.mark.parametrize("size", [20, 21, 25, 29, 100, 257])
def test_spread_windows_do_not_overlap_and_reach_both_ends(size):
    windows = spread(torch.arange(size), 8, 9)
    assert windows.shape == (min(8, size // 10), 10)
    assert windows.unique().numel() == windows.numel()
    assert windows[0, 0] == 0
    assert windows[-1, -1] == size - 1


@pytest.mark.parametrize("cut", [batch, spread])
def test_text_shorter_than_a_window_is_refused(cut):
    extra = (torch.Generator(),) if cut is batch else ()
    with pytest.raises(ValueError, match=r"text: got 9 bytes; expected at least length \+ 1 = 10"):
        cut(torch.zeros(9, dtype=torch.uint8), 1, 9, *extra)
    with pytest.raises(ValueError, match="rows: got 0; expected"):
        cut(torch.zeros(99, dtype=torch.uint8), 0, 9, *extra)


def test_what_is_left_out_is_said_in_one_place():
    assert {"site-packages", "test", "encodings"} <= standard_library.WITHOUT
