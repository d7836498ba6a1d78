"""Images as sequences: scikit-learn's digits, which every user can have, and CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from linattn._validation import reject
from linattn.tasks.examples import Classes, generator
from linattn.tasks.files import require_file, require_folder

DIGITS_SHARES = {"train": (0.0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}
CIFAR_RECORD = 1 + 3 * 32 * 32  # bytes: the class, then red, green and blue planes
GREY = (0.2989, 0.5870, 0.1140)  # shares of red, green, blue (ITU-R BT.601)


def digits(*, split: str = "train", seed: int = 0) -> Classes:
    """Return scikit-learn's 1797 handwritten digits, [n, 1, 8, 8] of levels 0 to 255.

    Seven, one and two tenths of them are for training, validation and test; the seed says which.

    Raises:
        ValueError: an unknown split; ImportError: no scikit-learn.
    """
    generator(seed, split)  # checks both
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=generator(seed, "train"))
    low, high = (round(share * len(labels)) for share in DIGITS_SHARES[split])
    chosen = order[low:high]
    levels = (torch.from_numpy(images).view(-1, 1, 8, 8) * 255 / 16).round().long()
    return Classes(levels[chosen], torch.from_numpy(labels).long()[chosen])


def cifar10(folder: Path, *, split: str = "train", grey: bool = True) -> Classes:
    """Return CIFAR-10 from the folder `cifar-10-batches-bin`, the binary version.

    Grey: [n, 1, 32, 32] of levels 0 to 255, as Long Range Arena has it; else [n, 3, 32, 32]. Of the
    five training files the last 5,000 images (a tenth, of shorter files) are for validation.

    Raises:
        ValueError: files that are missing or cut, or an unknown split.
    """
    generator(0, split)
    names = ["test_batch.bin"] if split == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    require_folder(folder, *names)
    images, labels = zip(*(_cifar_file(folder / name) for name in names), strict=True)
    x, y = torch.cat(images), torch.cat(labels)
    cut = len(y) - len(y) // 10
    if split != "test":
        part = slice(0, cut) if split == "train" else slice(cut, None)
        x, y = x[part], y[part]
    if grey:
        shares = torch.tensor(GREY).view(1, 3, 1, 1)
        x = (x.float() * shares).sum(1, keepdim=True).round().clamp(0, 255)
    return Classes(x.long(), y)


def _cifar_file(path: Path) -> tuple[Tensor, Tensor]:
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) == 0 or len(raw) % CIFAR_RECORD != 0:
        reject("path", f"{path} of {len(raw)} bytes", f"records of {CIFAR_RECORD}")
    records = torch.from_numpy(raw).view(-1, CIFAR_RECORD)
    labels = records[:, 0].long()
    if int(labels.max()) > 9:
        reject("path", f"{path} with class {int(labels.max())}", "0 to 9")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def pathfinder_files(folder: Path, *, split: str = "train") -> Classes:
    """Return the published Pathfinder images from a folder with `metadata` and `imgs`.

    A line of a metadata file holds the folder and name of an image and, fourth, its class. Blank
    images, of which the published set has some, are left out. In the order of the files the first
    eight tenths are for training, one tenth each for validation and test.

    Raises:
        ValueError: a folder or image that is missing, or a line that is none.
    """
    from PIL import Image

    generator(0, split)
    require_folder(folder, "metadata", "imgs")
    lines = []
    for path in sorted((folder / "metadata").glob("*.npy"), key=lambda p: (len(p.name), p.name)):
        lines += path.read_text().splitlines()
    first, last = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}[split]
    images, labels = [], []
    for line in lines[len(lines) * first // 10 : len(lines) * last // 10]:
        words = line.split()
        if len(words) < 4 or words[3] not in ("0", "1"):
            reject("path", f"{folder}/metadata with {line!r}", "folder, name, number, class 0 or 1")
        path = folder / words[0] / words[1]
        require_file(path)
        if path.stat().st_size == 0:
            continue
        with Image.open(path) as image:
            levels = np.asarray(image.convert("L"))
        if levels.any():
            images.append(torch.from_numpy(levels.copy()).long())
            labels.append(int(words[3]))
    if not images:
        reject("path", f"{folder} without an image in the {split} part", "at least one")
    return Classes(torch.stack(images)[:, None], torch.tensor(labels))
