"""ListOps, Pathfinder, and the files of Long Range Arena: golden properties, small files."""

import math
import re

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from linattn.tasks import images, listops
from linattn.tasks import long_range_arena as lra
from linattn.tasks.listops import TOKEN, WORDS
from linattn.tasks.pathfinder import PATH_X, PATHFINDER, draw, pathfinder, scene

FUNCTIONS = {
    "[MIN": min,
    "[MAX": max,
    "[SM": lambda *values: sum(values) % 10,
    "[MED": lambda *values: int(np.median(values)),
}


def evaluate(text):
    """An evaluator of its own: a stack, and numpy's median."""
    stack = [[]]
    for word in text:
        if word in FUNCTIONS:
            stack.append([word])
        elif word == "]":
            operator, *values = stack.pop()
            assert 2 <= len(values) <= 10
            stack[-1].append(FUNCTIONS[operator](*values))
        else:
            stack[-1].append(int(word))
    ((result,),) = stack
    return result


def text_of(row, length):
    return [WORDS[token] for token in row[:length].tolist()]


def test_listops_values_are_those_of_another_evaluator():
    inputs, labels, lengths = listops.listops(150, shortest=51, longest=600, seed=1)
    assert inputs.shape == (150, 600)
    assert lengths.min() >= 51
    for row, label, length in zip(inputs, labels.tolist(), lengths.tolist(), strict=True):
        assert evaluate(text_of(row, length)) == label
        assert (row[length:] == 0).all()
        assert (row[:length] > 0).all()
    assert labels.unique().numel() == 10
    assert {WORDS[t] for t in inputs.unique().tolist()} == set(WORDS)


def test_listops_published_lengths_depth_and_splits():
    inputs, _, lengths = listops.listops(12, seed=2)
    assert 500 < lengths.min() <= lengths.max() < 2000
    for row, length in zip(inputs, lengths.tolist(), strict=True):
        depth = deepest = 0
        for word in text_of(row, length):
            depth += (word in FUNCTIONS) - (word == "]")
            deepest = max(deepest, depth)
        assert deepest <= 9  # operators: at depth 10 there are digits only
    splits = [
        {tuple(r) for r in listops.listops(200, shortest=4, longest=20, split=s).inputs.tolist()}
        for s in listops.SPLITS
    ]
    assert [len(s) for s in splits] == [200] * 3
    assert len(set.union(*splits)) == 600
    again = listops.listops(12, seed=2)
    assert (again.inputs == inputs).all()


def test_listops_operators_and_arguments_are_drawn_evenly():
    inputs, _, _ = listops.listops(2000, shortest=2, longest=40, seed=0)
    counts = torch.tensor([(inputs == TOKEN[name]).sum() for name in listops.OPERATORS])
    assert counts.sum() > 2000
    share = counts / counts.sum()
    assert (share - 0.25).abs().max() < 5 * math.sqrt(0.1875 / float(counts.sum()))


def test_listops_files(tmp_path):
    path = tmp_path / "basic_train.tsv"
    tree = ("[MAX", [4, ("[MIN", [2, 9]), 0])
    assert listops.bracketed(tree) == "( ( ( ( [MAX 4 ) ( ( ( [MIN 2 ) 9 ) ] ) ) 0 ) ] )"
    path.write_text(f"Source\tTarget\n{listops.bracketed(tree)}\t4\n7\t7\n")
    inputs, labels, lengths = listops.read(path, 12)
    assert labels.tolist() == [4, 7]
    assert text_of(inputs[0], 8) == list(listops.words(tree))
    assert lengths.tolist() == [8, 1]
    for text, message in (
        ("Source\tTarget\n[FOO 1 ]\t1\n", r"line 2, with '\[FOO'"),
        ("Source\tTarget\n1\tx\n", "line 2, with 'x'"),
        ("Source\tTarget\n1\n", "line 2, cut short"),
        ("a\tb\n1\t1\n", "with the columns"),
        ("Source\tTarget\n", "without a line"),
        ("", "with the columns None"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            listops.read(path)
    path.write_bytes(b"Source\tTarget\n\xff\t1\n")
    with pytest.raises(ValueError, match="UTF-8"):
        listops.read(path)
    with pytest.raises(ValueError, match=r"path: got .*none; expected a file"):
        listops.read(tmp_path / "none")


@pytest.mark.parametrize("drawing", [PATHFINDER, PATH_X], ids=["pathfinder", "path_x"])
@pytest.mark.parametrize("connected", [True, False])
def test_pathfinder_by_flood_fill(drawing, connected):
    """Dashes thicker than the gaps and thinner than the margins: paths are what hangs together."""
    random = np.random.default_rng(5)
    fine = 256 // drawing.size  # points a pixel
    for _ in range(4):
        lines = scene(drawing, connected, random)
        axis = np.arange(0, drawing.size, 1 / fine)
        points = np.stack(np.meshgrid(axis, axis, indexing="xy"), -1)
        radius = (drawing.gap / 2 + drawing.margin / 2) / 2
        flood = np.zeros(points.shape[:2], dtype=bool)
        for dash in lines.dashes:
            a, along = dash[0], dash[1] - dash[0]
            share = np.clip(((points - a) @ along) / (along @ along), 0, 1)
            flood |= np.linalg.norm(points - a - share[..., None] * along, axis=-1) <= radius
        parts, number = ndimage.label(flood, structure=np.ones((3, 3)))
        (x0, y0), (x1, y1) = np.round(lines.discs * fine).astype(int)
        assert parts[y0, x0] > 0
        assert parts[y1, x1] > 0
        assert (parts[y0, x0] == parts[y1, x1]) == connected
        assert number == 2 + drawing.short_paths
        picture = draw(drawing, lines)
        assert picture.shape == (drawing.size,) * 2
        for x, y in np.round(lines.discs).astype(int):
            assert picture[y, x] == 1
        assert np.bincount(lines.paths).tolist() == (
            [drawing.dashes] * 2 + [drawing.short_dashes] * drawing.short_paths
        )


def test_pathfinder_examples():
    inputs, labels, _ = pathfinder(6, seed=1)
    assert inputs.shape == (6, 1, 32, 32)
    assert 0 <= inputs.min() < inputs.max() == 255
    assert labels.tolist() == [0, 1] * 3
    assert (pathfinder(6, seed=1).inputs == inputs).all()
    assert not (pathfinder(6, seed=1, split="test").inputs == inputs).flatten(1).all(1).any()
    with pytest.raises(ValueError, match="examples: got 0"):
        pathfinder(0)


def test_digits_are_split_without_overlap():
    parts = [images.digits(split=s) for s in ("train", "validation", "test")]
    assert [len(p.labels) for p in parts] == [1258, 180, 359]
    assert parts[0].inputs.shape[1:] == (1, 8, 8)
    from sklearn.datasets import load_digits

    all_rows = np.sort((load_digits().data * 255 / 16).round(), axis=0)
    found = torch.cat([p.inputs.flatten(1) for p in parts]).numpy()
    assert (np.sort(found, axis=0) == all_rows).all()


def test_cifar_in_its_binary_form(tmp_path):
    random = np.random.default_rng(0)
    records = random.integers(0, 256, (6, 20, images.CIFAR_RECORD), dtype=np.uint8)
    records[:, :, 0] %= 10
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name, rows in zip(names, records, strict=True):
        (tmp_path / name).write_bytes(rows.tobytes())
    train, validation, test = (
        images.cifar10(tmp_path, split=s) for s in ("train", "validation", "test")
    )
    assert [len(p.labels) for p in (train, validation, test)] == [90, 10, 20]
    assert test.labels.tolist() == records[5, :, 0].tolist()
    red, green, blue = records[5, 3, 1:].reshape(3, 32, 32).astype(float)
    grey = np.round(0.2989 * red + 0.587 * green + 0.114 * blue)
    assert np.abs(test.inputs[3, 0].numpy() - grey).max() <= 1
    colour = images.cifar10(tmp_path, split="test", grey=False)
    assert colour.inputs.shape == (20, 3, 32, 32)
    (tmp_path / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="of 3 bytes; expected records of 3073"):
        images.cifar10(tmp_path, split="test")
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(ValueError, match=r"path: got .* a folder with data_batch_1\.bin"):
        images.cifar10(tmp_path)


def test_pathfinder_files_without_the_blank_ones(tmp_path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "imgs" / "0").mkdir(parents=True)
    lines = []
    for i in range(20):
        path = tmp_path / "imgs" / "0" / f"sample_{i}.png"
        Image.fromarray(np.full((32, 32), i, dtype=np.uint8)).save(path)  # the first is blank
        lines.append(f"imgs/0 sample_{i}.png {i} {i % 2} 2 3\n")
    (tmp_path / "imgs" / "0" / "sample_5.png").write_bytes(b"")
    (tmp_path / "metadata" / "0.npy").write_text("".join(lines))
    train = images.pathfinder_files(tmp_path)
    assert train.inputs[:, 0, 0, 0].tolist() == [1, 2, 3, 4, *range(6, 16)]
    assert train.labels.tolist() == [i % 2 for i in (1, 2, 3, 4, *range(6, 16))]
    assert images.pathfinder_files(tmp_path, split="test").inputs[:, 0, 0, 0].tolist() == [18, 19]
    (tmp_path / "metadata" / "0.npy").write_text("imgs/0 sample_1.png\n" * 20)
    with pytest.raises(ValueError, match="folder, name, number, class"):
        images.pathfinder_files(tmp_path)


def test_reviews_as_bytes(tmp_path):
    for part in ("train", "test"):
        for label in ("pos", "neg"):
            (tmp_path / part / label).mkdir(parents=True)
            for i in range(3):
                text = f"{part} {label} {i} é".encode()
                (tmp_path / part / label / f"{i}_7.txt").write_bytes(text)
    inputs, labels, lengths = lra.imdb(tmp_path, longest=12)
    assert inputs.shape == (6, 12)
    for row, label, length in zip(inputs, labels.tolist(), lengths.tolist(), strict=True):
        text = bytes((row[:length] - 1).tolist()).decode()
        assert re.fullmatch(rf"train {('neg', 'pos')[label]} \d ?", text)
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1]
    test, validation = (lra.imdb(tmp_path, split=s, longest=64) for s in ("test", "validation"))
    assert sorted(test.inputs.tolist()) == sorted(validation.inputs.tolist())
    with pytest.raises(ValueError, match="a folder with pos, neg"):
        lra.imdb(tmp_path / "train")


def test_pairs_of_papers(tmp_path):
    path = tmp_path / "new_aan_pairs.eval.tsv"
    path.write_text("1.0\tA\tB\tab\txyz\n0\tA\tC\tabcdefgh\tz\n")
    inputs, labels, lengths = lra.aan(tmp_path, split="validation", longest=4)
    assert labels.tolist() == [1, 0]
    assert lengths.tolist() == [[2, 3], [4, 1]]
    assert inputs[0].tolist() == [[98, 99, 0, 0], [121, 122, 123, 0]]
    path.write_text("2\tA\tB\tab\txyz\n")
    with pytest.raises(ValueError, match="line 1, of 5 columns; expected 0 or 1"):
        lra.aan(tmp_path, split="validation")
    with pytest.raises(ValueError, match=r"train\.tsv; expected a file"):
        lra.aan(tmp_path)


def test_the_two_settings_are_the_published_ones():
    """Steps, rows and warm-up in full; never the sizes of one with the schedule of the other."""
    small, deep = lra.SETTINGS["nystromformer"], lra.SETTINGS["s4"]
    assert {(s.layers, s.dim, s.feed_forward, s.heads) for s in small.values()} == {(2, 64, 128, 2)}
    assert {s.layers for s in deep.values()} == {6}
    assert {name: (s.rows, s.warm_up, s.steps) for name, s in small.items()} == {
        "listops": (32, 1000, 5000),
        "imdb": (32, 8000, 20_000),
        "aan": (32, 800, 30_000),
        "cifar10": (256, 175, 35_000),
        "pathfinder": (256, 312, 62_400),
    }
    assert (deep["listops"].steps, deep["listops"].warm_up) == (120_000, 12_000)
    assert (deep["cifar10"].dim, deep["cifar10"].rows, deep["cifar10"].dropout) == (512, 50, 0.1)
