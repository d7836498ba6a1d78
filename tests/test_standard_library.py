"""The standard library as a text: what it holds, and the baseline on it."""

import math

import pytest
import torch

from linattn.tasks import standard_library
from linattn.tasks.standard_library import bigram_entropy, source_files


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


def test_installed_packages_are_not_part_of_it(folder):
    assert [path.name for path in source_files(folder)] == [f"{i:02}.py" for i in range(12)]


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


def test_what_is_left_out_is_said_in_one_place():
    assert {"site-packages", "test", "encodings"} <= standard_library.WITHOUT
