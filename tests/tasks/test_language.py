"""Text and its batches: every token once an epoch, documents apart, the same by number and seed."""

from itertools import pairwise

import pytest
import torch

from linattn.tasks.language import batch, load, spread


@pytest.fixture
def folder(tmp_path):
    """Forty documents of a letter and a length of their own; files that are no text."""
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(chr(ord("A") + i) * (10 + i))
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe" * 50)
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("not a document")
    return tmp_path


def test_every_twentieth_document_is_held_out(folder):
    train, held_out = load(folder, None)
    assert bytes(held_out.tokens.tolist()) == b"T" * 29 + b"h" * 49
    assert held_out.starts.tolist() == [0, 29]
    assert train.tokens.numel() == train.num_bytes == sum(10 + i for i in range(40)) - 78
    assert set(train.tokens.tolist()) == {ord("A") + i for i in range(40)} - set(b"Th")
    assert len(train.starts) == 38


def test_a_single_file_is_cut_and_a_tokenizer_is_asked(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("é" * 100)
    train, held_out = load(path, None)
    assert (train.tokens.numel(), held_out.tokens.numel()) == (190, 10)
    assert train.starts.tolist() == [0]
    train, held_out = load(path, lambda text: [7] * (len(text) // 5))
    assert train.tokens.tolist() == [7] * 19
    assert train.bytes_per_token == 10


def test_the_standard_library_is_the_default():
    train, held_out = load(None, None)
    assert train.tokens.numel() > 10 * held_out.tokens.numel() > 1_000_000
    assert len(train.starts) > 100


def test_an_epoch_takes_every_window_once_and_the_next_in_another_order(folder):
    train, _ = load(folder, None)
    rows, length = 3, 16
    count = (train.tokens.numel() // length - 1) // rows
    epochs = []
    for epoch in range(2):
        batches = [batch(train, rows, length, epoch * count + i, seed=0) for i in range(count)]
        windows = torch.cat([b.tokens.view(rows, length) for b in batches])
        text = bytes(train.tokens.tolist())
        firsts = [text.find(bytes(w.tolist())) for w in windows]
        assert min(firsts) >= 0  # each stands in the text
        epochs.append(windows)
    assert not torch.equal(*epochs)
    again = batch(train, rows, length, count + 1, seed=0)
    assert torch.equal(again.tokens.view(rows, length), epochs[1][rows : 2 * rows])
    other = batch(train, rows, length, count + 1, seed=1)
    assert not torch.equal(again.tokens, other.tokens)


def test_windows_of_an_epoch_do_not_overlap(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text("x" * 1000)
    train, _ = load(path, lambda text: list(range(len(text))))
    count = (950 // 16 - 1) // 3
    seen = torch.cat([batch(train, 3, 16, i, seed=5).tokens.flatten() for i in range(count)])
    assert seen.unique().numel() == seen.numel() == count * 48
    assert (seen.view(-1, 16).diff(dim=1) == 1).all()


def test_a_document_that_begins_inside_begins_a_sequence(folder):
    train, held_out = load(folder, None)
    for b in (batch(train, 4, 32, 2, seed=3), spread(held_out, 2, 30)):
        tokens, bounds = b.tokens[0], b.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == tokens.numel()
        for i, j in pairwise(bounds):
            assert tokens[i:j].unique().numel() == 1  # a document is one letter
        length = tokens.numel() // (4 if tokens.numel() == 128 else 2)
        changes = {i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1]}
        assert set(bounds[1:-1]) >= changes
        assert set(bounds) >= set(range(0, tokens.numel(), length))
        assert b.scored == tokens.numel() - (len(bounds) - 1)


@pytest.mark.parametrize("size", [20, 29, 100, 257])
def test_spread_windows_do_not_overlap_and_reach_both_ends(size, tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text("x" * 20 * size)
    _, held_out = load(path, lambda text: list(range(len(text))))
    windows = spread(held_out, 8, 9).tokens.view(-1, 9)
    assert len(windows) == min(8, size // 9)
    assert windows.unique().numel() == windows.numel()
    assert windows[0, 0] == 0
    assert windows[-1, -1] == size - 1


def test_what_is_refused(folder, tmp_path):
    train, held_out = load(folder, None)
    for call, message in (
        (lambda: load(tmp_path / "nowhere", None), "data: got .*nowhere; expected a text file"),
        (lambda: load(folder / "image.bin", None), r"data: got .*image.bin, no text in UTF-8"),
        (lambda: load(folder / ".git", None), "data: got .* with 1 text files; expected at least"),
        (lambda: load(folder / "empty.txt", None), "data: got .* without text in one part"),
        (lambda: batch(train, 4, 1000, 0, 0), r"data: got .* tokens of text; expected at least"),
        (lambda: batch(train, 0, 10, 0, 0), "rows: got 0"),
        (lambda: spread(held_out, 4, 1000), "data: got 78 tokens held out; expected at least"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
