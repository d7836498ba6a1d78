"""Pathfinder and Path-X (Linsley et al. 2018; Tay et al. 2021): are the two discs on one path?

Paths are chains of dashes that turn a little from one to the next. An image holds two long ones and
several short ones, all apart from each other, and two discs, on the ends of one long path or on
one end of each. The pictures are our own drawing of the published sizes, not the published files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from linattn._validation import reject, require_positive_int
from linattn.tasks.examples import Classes, generator

Array = np.ndarray


@dataclass(frozen=True)
class Drawing:
    """What an image looks like; lengths in pixels.

    Attributes:
        size: height and width.
        dashes: of each of the two long paths.
        dash: length of a dash.
        gap: between two dashes of a path.
        thickness: of a dash.
        marker_radius: of the discs.
        padding: what stays free at the edges.
        margin: the least distance between dashes of two paths, and of one that comes back.
        seed_distance: from the first point of one long path to that of the other.
        continuity: the larger, the straighter: an angle turns by pi / (8 continuity) a dash,
            standard deviation.
        short_paths: how many.
        short_dashes: of each.
        contrast: grey level of the paths, 1 that of the discs.
    """

    size: int
    dashes: int
    dash: float
    gap: float
    thickness: float
    marker_radius: float
    padding: float
    margin: float
    seed_distance: float
    continuity: float
    short_paths: int
    short_dashes: int
    contrast: float


# The published sizes; gaps, the margin of the smaller and the dash of the larger are our choice.
PATHFINDER = Drawing(32, 14, 2.0, 1.0, 0.5, 1.5, 1.0, 1.5, 7.0, 1.0, 20 // 4, 14 // 3, 0.75)
PATH_X = Drawing(128, 14, 5.0, 2.0, 1.5, 3.0, 1.0, 5.0, 20.0, 1.8, 35 // 4, 14 // 3, 0.9)


class Scene(NamedTuple):
    """The lines of an image: dashes [n, 2, 2] as (x, y) ends, the path of each, two discs."""

    dashes: Array
    paths: Array
    discs: Array  # [2, 2]
    connected: bool


def distance(points: Array, dashes: Array) -> Array:
    """Return the distances [..., n] of points [..., 2] from dashes [n, 2, 2]."""
    a, along = dashes[:, 0], dashes[:, 1] - dashes[:, 0]
    away = points[..., None, :] - a
    share = np.clip((away * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-12), 0, 1)
    nearest: Array = np.linalg.norm(away - share[..., None] * along, axis=-1)
    return nearest


def _path(
    drawing: Drawing, number: int, first: Array, others: Array, random: np.random.Generator
) -> Array | None:
    """Return a path of `number` dashes [number, 2, 2] from a point, None where it has no room."""
    d = drawing
    lowest, highest = d.padding, d.size - 1 - d.padding
    angle = random.uniform(0, 2 * math.pi)
    path: list[Array] = []
    place = first
    samples = np.linspace(0, 1, 5)[:, None]
    while len(path) < number:
        old = path[:-1]
        near = np.concatenate([others, np.stack(old)]) if old else others
        for _ in range(8):
            turned = angle if not path else angle + random.normal(0, math.pi / 8 / d.continuity)
            step = np.array([math.cos(turned), math.sin(turned)])
            start = place + d.gap * step if path else place
            stop = start + d.dash * step
            if min(*start, *stop) < lowest or max(*start, *stop) > highest:
                continue
            points = start + samples * (stop - start)
            if len(near) == 0 or distance(points, near).min() >= d.margin:
                path.append(np.stack([start, stop]))
                place, angle = stop, turned
                break
        else:
            return None
    return np.array(path)


def scene(drawing: Drawing, connected: bool, random: np.random.Generator) -> Scene:
    """Return the lines of an image whose discs are on one path, or on two."""
    d = drawing
    low, high = d.padding, d.size - 1 - d.padding
    while True:
        first = random.uniform(low, high, 2)
        turn = random.uniform(0, 2 * math.pi)
        second = first + d.seed_distance * np.array([math.cos(turn), math.sin(turn)])
        paths: list[Array] = []
        starts = [first, second, *random.uniform(low, high, (20 * d.short_paths, 2))]
        for start in starts:
            long = len(paths) < 2
            others = np.concatenate([np.zeros((0, 2, 2)), *paths])
            number = d.dashes if long else d.short_dashes
            tries = (_path(d, number, start, others, random) for _ in range(10 if long else 1))
            made = next((path for path in tries if path is not None), None)
            if made is not None:
                paths.append(made)
            elif long:
                break
            if len(paths) == 2 + d.short_paths:
                ends = (paths[0][0, 0], paths[0][-1, 1] if connected else paths[1][-1, 1])
                of = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
                return Scene(np.concatenate(paths), of, np.stack(ends), connected)


def draw(drawing: Drawing, lines: Scene) -> Array:
    """Return the image [size, size] of float32 in [0, 1], row by row, smoothed at the edges."""
    axis = np.arange(drawing.size, dtype=float)
    points = np.stack(np.meshgrid(axis, axis, indexing="xy"), -1)  # [y, x, (x, y)]
    near = distance(points, lines.dashes).min(-1)
    discs = np.linalg.norm(points[..., None, :] - lines.discs, axis=-1).min(-1)
    strokes = drawing.contrast * np.clip(drawing.thickness / 2 + 0.5 - near, 0, 1)
    image: Array = np.maximum(strokes, np.clip(drawing.marker_radius + 0.5 - discs, 0, 1))
    return image.astype(np.float32)


def pathfinder(
    examples: int, *, drawing: Drawing = PATHFINDER, seed: int = 0, split: str = "train"
) -> Classes:
    """Return images [n, 1, size, size] of grey levels 0 to 255 and whether the discs are joined.

    Every second example is. Published: about 200,000, split 80 / 10 / 10.

    Raises:
        ValueError, TypeError: examples < 1, an unknown split, or paths that are longer than the
            image has room for.
    """
    require_positive_int("examples", examples)
    room = drawing.dashes * (drawing.dash + drawing.gap)
    if room * drawing.margin > drawing.size**2 / 3:
        reject("drawing", f"paths {room:g} long in {drawing.size} pixels", "shorter paths")
    random = np.random.default_rng(generator(seed, split).initial_seed())
    labels = torch.arange(examples) % 2
    images = [
        draw(drawing, scene(drawing, bool(label), random)) for label in labels.tolist()
    ]  # fmt: skip
    levels = torch.from_numpy(np.stack(images) * 255).round().long()
    return Classes(levels[:, None], labels)
