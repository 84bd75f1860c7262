"""`shapes`: a data set drawn from a seed, in which the label is a relation between two small objects far apart.

Each image shows two objects on a noisy grey ground, one near the left edge and one near the right, each a square, a
disc, a cross or a triangle in red, green, blue or yellow. The label: have the two the same colour? Kinds, sizes, places
and shades say nothing about it, and neither does the colour of one object alone: each of the four is as likely under
either label.

So a network that only looks locally must fail. Between the objects there are at least `gap(size)` empty columns (14 of
32), and no window of that width sees both. If such windows are averaged and classified linearly, as in ResNets, the
score is a sum a(left object) + b(right object). Take any two objects that differ in colour only, i and j: the cases
(i, i), (j, j) are "same", (i, j), (j, i) "different", and the scores of the former have the same sum as those of the
latter, so that at least one of the four is on the wrong side of any threshold. These quadruples, equally weighted,
make up the whole data set: three of four images is the best that such a network can reach. Attention lets each object
look at the other; a convolutional network needs depth, until its windows span the image.

`shapes:distance=24` is the same question, graded: the objects, small in any size of image, lie anywhere, beside each
other and `distance` empty columns apart. A network whose windows are wider than that can answer it.

The boxes and kinds of the objects come with the images, for detection. Mirroring an image keeps its label; cropping may
cut an object off.
"""

import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..utils.memory import machine_bytes
from ..utils.terminal import readable_bytes

CLASSES = ("different colours", "same colour")
KINDS = ("square", "disc", "cross", "triangle")
COLOURS = {"red": (225, 50, 50), "green": (40, 190, 70), "blue": (60, 90, 235), "yellow": (235, 205, 45)}
MIN_SIZE = 24
GRADED_SIDES, GRADED_SHIFT = (5, 6, 7), 3
"""Of objects at a given distance: their sides, and how much higher or lower than the left one the right one may lie."""
SHADE, NOISE = 20, 16  # how far an object's colour, and a pixel, may be off in 0..255

_CHUNK = 2048  # images drawn at once; image i is the same however many are drawn


class Drawing(NamedTuple):
    """`images` uint8 [number, size, size, 3], `labels` int64 [number], the objects' `boxes` float32 [number, 2, 4] as
    x0, y0, x1, y1 in pixels (ends excluded) and their `kinds` int64 [number, 2], left object first."""

    images: Tensor
    labels: Tensor
    boxes: Tensor
    kinds: Tensor


def options_of(name: str) -> dict[str, int]:
    """What stands behind the colon of shapes:distance=24; a ValueError says how it is written."""
    found = re.fullmatch(r"shapes(:distance=(\d{1,6}))?", name)
    if found is None:
        raise ValueError(f"unknown data set {name!r}; write shapes, or shapes:distance=24")
    return {} if found[2] is None else {"distance": int(found[2])}


def draw(number: int, size: int = 32, *, seed: int = 0, distance: int | None = None) -> Drawing:
    """The first `number` images of the endless sequence that belongs to `seed`, `size` and `distance`.

    distance: empty columns between the objects; None: they lie at either edge, `gap(size)` or more apart.
    """
    if number < 1:
        raise ValueError(f"number must be at least 1, got {number}")
    if size < MIN_SIZE:
        raise ValueError(f"size must be at least {MIN_SIZE} pixels, got {size}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if distance is not None and not 0 <= distance <= size - 2 * max(GRADED_SIDES):
        raise ValueError(
            f"distance must be 0 to {size - 2 * max(GRADED_SIDES)} in images of {size} pixels, got {distance}; "
            f"larger images (--size) have room for more"
        )
    _check_memory(number, size)
    seeds = [seed, size] if distance is None else [seed, size, distance]
    chunks = [_draw_chunk(np.random.default_rng([*seeds, start]), size, distance) for start in range(0, number, _CHUNK)]
    return Drawing(*(torch.from_numpy(np.concatenate(parts)[:number]) for parts in zip(*chunks, strict=True)))


def _check_memory(number: int, size: int) -> None:
    """A ValueError where this machine could not hold the images: all as bytes, and of a chunk three times as much."""
    needed = 3 * size**2 * (number + 3 * _CHUNK)
    there = machine_bytes()
    if there is not None and needed > there:
        raise ValueError(
            f"{number:,} shapes of {size} x {size} pixels take {readable_bytes(needed)}, this machine has "
            f"{readable_bytes(there)}; draw smaller ones (--size) or fewer (--train-limit, --eval-limit)"
        )


def sides(size: int) -> tuple[int, ...]:
    """The sides an object can have, in pixels."""
    middle = round(size * 6 / 32)
    return middle - 1, middle, middle + 1


def strip(size: int) -> int:
    """The width of the strip at either edge that holds an object."""
    return max(sides(size)) + size // 16


def gap(size: int) -> int:
    """The number of columns in the middle that no object touches."""
    return size - 2 * strip(size)


def _at_the_edges(random: np.random.Generator, size: int, side: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y of both objects, int [number, 2]: one in the strip at either edge."""
    x = random.integers(strip(size) - side + 1)
    x[:, 1] += size - strip(size)
    return x, random.integers(size - side + 1)


def _apart(random: np.random.Generator, size: int, side: np.ndarray, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """The same, `distance` columns apart anywhere in the image, and about as high."""
    left = random.integers(size - side.sum(1) - distance + 1)
    top = random.integers(size - side[:, 0] + 1)
    shift = random.integers(-GRADED_SHIFT, GRADED_SHIFT + 1, size=len(side))
    beside = (top + shift).clip(0, size - side[:, 1])
    return np.stack([left, left + side[:, 0] + distance], axis=1), np.stack([top, beside], axis=1)


def _draw_chunk(random: np.random.Generator, size: int, distance: int | None) -> tuple[np.ndarray, ...]:
    number, palette = _CHUNK, np.array(list(COLOURS.values()))
    labels = random.integers(2, size=number)
    left = random.integers(len(palette), size=number)
    another = (left + random.integers(1, len(palette), size=number)) % len(palette)
    colours = np.stack([left, np.where(labels == 1, left, another)], axis=1)
    kinds = random.integers(len(KINDS), size=(number, 2))
    known = sides(size) if distance is None else GRADED_SIDES
    which = random.integers(len(known), size=(number, 2))
    side = np.array(known)[which]
    x, y = _at_the_edges(random, size, side) if distance is None else _apart(random, size, side, distance)
    shades = palette[colours] + random.integers(-SHADE, SHADE + 1, size=(number, 2, 3))

    ground = random.integers(40, 110, size=(number, 1, 1, 1), dtype=np.uint8)
    images = np.broadcast_to(ground, (number, size, size, 3)).copy()
    # The stencils are padded to the largest side: reach that far beyond the image, and cut it off again.
    stencils = _stencils(known)
    reach = stencils.shape[-1]
    canvas = np.pad(images, ((0, 0), (0, reach), (0, reach), (0, 0)))
    offsets = np.arange(reach)
    for one in range(2):
        image, row, column = np.nonzero(stencils[kinds[:, one], which[:, one]])
        canvas[image, y[image, one] + offsets[row], x[image, one] + offsets[column]] = shades[image, one]
    images = canvas[:, :size, :size].astype(np.int16)
    images += random.integers(2 * NOISE + 1, size=images.shape, dtype=np.uint8)
    images -= NOISE
    boxes = np.stack([x, y, x + side, y + side], axis=-1)
    return images.clip(0, 255).astype(np.uint8), labels, boxes.astype(np.float32), kinds


def _stencils(known: tuple[int, ...]) -> np.ndarray:
    """bool [kind, side, reach, reach]: each kind in each side, in the upper left corner, touching all four edges."""
    reach = max(known)
    stencils = np.zeros((len(KINDS), len(known), reach, reach), dtype=bool)
    for number, side in enumerate(known):
        y, x = np.mgrid[:side, :side]
        middle = (side - 1) / 2
        across, down = abs(x - middle), abs(y - middle)
        beam = max(side // 5, 1)
        beam += (beam + side) % 2  # odd in odd sides: it has to lie in the middle
        forms = (
            np.ones((side, side), dtype=bool),
            across**2 + down**2 <= (side / 2) ** 2 + 0.25,
            np.minimum(across, down) < beam / 2,
            2 * across <= y + (side - 1) % 2,
        )
        for kind, form in enumerate(forms):
            stencils[kind, number, :side, :side] = form
    return stencils
