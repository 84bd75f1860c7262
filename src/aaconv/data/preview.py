"""A sheet of examples of a data set, with class names, and boxes where there are any: `aaconv data preview NAME`."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torchvision.transforms.v2.functional import resize

from ..utils import figures
from .class_names import class_colour, class_title
from .coco import DetectionDataset, Objects, open_detection
from .datasets import ArrayDataset, Dataset, open_dataset
from .images import Skipped, UnreadableImage
from .loaders import make_loader
from .policy import Policy

INK, PALE, BOX = "#222222", "#6b6b6b", "#ffffff"
STYLE = {"font.family": "sans-serif", "font.size": 9, "text.color": INK}
CELL, SIDE, CAPTION, HEADER, MARGIN = 1.3, 1.18, 0.22, 0.85, 0.3  # inches
MAX_COUNT = 400
LETTERS = 21  # what fits under an image
LARGEST_SIDE = 1000  # pixels of an image that is kept; its cell has fewer


class Example(NamedTuple):
    """An image, made smaller if it was large, its (height, width) before, and its label, its objects or a caption."""

    index: int  # type: ignore[assignment]
    image: Tensor
    size: tuple[int, int]
    shown: int | Objects | str


def save(
    name: str,
    path: str | Path,
    *,
    data_dir: str | Path | None = None,
    split: str = "train",
    count: int = 24,
    seed: int = 0,
    size: int | None = None,
    policy: Policy | None = None,
) -> Path:
    """Draw `count` examples, chosen (and for shapes drawn) by the seed, into an image file that is replaced whole.

    policy: as training sees them with it, in this size.
    """
    path = Path(path)
    figures.check_ending(path, (".png", ".jpg", ".webp", ".svg", ".pdf"))
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"count must be 1 to {MAX_COUNT}, got {count}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if name.partition("/")[0] == "coco":
        dataset: Dataset | DetectionDataset = open_detection(name, data_dir, split)
    else:
        dataset = open_dataset(name, data_dir, split, **({"seed": seed} if name == "shapes" else {}))
    examples = None
    if policy is not None:
        if isinstance(dataset, DetectionDataset):
            raise ValueError("only images of classes can be shown augmented; leave that out for coco")
        examples = _augmented(dataset, min(count, len(dataset)), seed, size, policy)
    figures.write(lambda: sheet(dataset, split, count=count, seed=seed, examples=examples), path, STYLE)
    return path


def sheet(
    dataset: Dataset | DetectionDataset, split: str, *, count: int, seed: int, examples: list[Example] | None = None
) -> Figure:
    """A grid of examples under a line about the data set; unreadable images are skipped like in training."""
    examples = examples or _examples(dataset, min(count, len(dataset)), seed)
    columns = min(len(examples), max(4, math.ceil(math.sqrt(1.5 * len(examples)))))
    rows = math.ceil(len(examples) / columns)
    width = max(columns * CELL - (CELL - SIDE), 4.5) + 2 * MARGIN
    height = rows * (CELL + CAPTION) + HEADER + MARGIN / 2
    figure = Figure(figsize=(width, height))
    figure.text(MARGIN / width, 1 - 0.42 / height, dataset.name, fontsize=15, fontweight="bold", va="baseline")
    figure.text(MARGIN / width, 1 - 0.66 / height, _about(dataset, split, examples), color=PALE, va="baseline")
    for number, (index, image, size, shown) in enumerate(examples):
        row, column = divmod(number, columns)
        left = MARGIN + column * CELL
        top = HEADER + row * (CELL + CAPTION)
        axes = figure.add_axes((left / width, 1 - (top + SIDE) / height, SIDE / width, SIDE / height))
        if isinstance(shown, str):
            _show(axes, image, size, shown)
        elif isinstance(shown, Objects):
            _show(axes, image, size, _most_frequent(shown, dataset.classes))
            _draw_objects(axes, shown)
        else:
            _show(axes, image, size, class_title(dataset.classes[shown]))
            _draw_boxes(axes, dataset, index)
    return figure


def _examples(dataset: Dataset | DetectionDataset, count: int, seed: int) -> list[Example]:
    """Images in random order."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    skipped, examples = Skipped(), []
    for index in order:
        try:
            image, shown = dataset[index]
            examples.append(Example(index, _shrunk(image), (image.shape[1], image.shape[2]), shown))
        except UnreadableImage as image:
            skipped.add(image)
        if len(examples) == count:
            break
    if not examples:
        name, reason = next(iter(skipped.reasons.items()))
        raise OSError(f"none of the {len(skipped)} images of {dataset.name} can be read; the first is {name}: {reason}")
    return examples


def _augmented(dataset: Dataset, count: int, seed: int, size: int | None, policy: Policy) -> list[Example]:
    """The first images of a training epoch, as a network would get them."""
    count += count % 2 if policy.mixes else 0
    loader = make_loader(dataset, min(count, len(dataset)), train=True, size=size, workers=0, seed=seed, policy=policy)
    images, labels = next(iter(loader.batches()))
    mean, std = (torch.tensor(values)[:, None, None] for values in (dataset.mean, dataset.std))
    pixels = (images.float() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    captions = (_caption(label, dataset.classes) for label in labels)
    return [Example(-1, _shrunk(one), tuple(one.shape[1:]), text) for one, text in zip(pixels, captions, strict=True)]


def _caption(label: Tensor, classes: tuple[str, ...]) -> str:
    """The class of an image, or of a mixed one both, with the larger share first."""
    if not label.is_floating_point():
        return class_title(classes[int(label)])
    there = label > label.min() + 1e-6  # more than its smoothing gives to all
    largest = label.argsort(descending=True, stable=True)[:2].tolist()
    return " + ".join(class_title(classes[index]) for index in largest if there[index])


def _shrunk(image: Tensor) -> Tensor:
    scale = LARGEST_SIDE / max(image.shape[1:])
    if scale >= 1:
        return image
    return resize(image, [max(1, round(scale * side)) for side in image.shape[1:]], antialias=True)


def _about(dataset: Dataset | DetectionDataset, split: str, examples: list[Example]) -> str:
    sizes = {example.size for example in examples}
    size = "{1} x {0} pixels".format(*next(iter(sizes))) if len(sizes) == 1 else "of many sizes"
    images = "training images" if split == "train" else "test images"
    if isinstance(dataset, DetectionDataset):
        return f"{len(dataset):,} {images} with objects of {len(dataset.classes):,} classes, {size}"
    return f"{len(dataset):,} {images} in {len(dataset.classes):,} classes, {size}"


def _show(axes: Axes, image: Tensor, size: tuple[int, int], title: str) -> None:
    height, width = size
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)  # boxes are in pixels of the file
    how = "nearest" if width < 100 else "antialiased"
    axes.imshow(image.permute(1, 2, 0).numpy(), interpolation=how, extent=extent)
    axes.axis("off")
    text = shorten(title, LETTERS, placeholder="…") if " " in title else title
    text = text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"
    axes.annotate(text, (0.5, 0), (0, -4), "axes fraction", "offset points", ha="center", va="top", fontsize=8)


def _most_frequent(objects: Objects, classes: tuple[str, ...]) -> str:
    """The classes in an image, those with most objects first."""
    labels = Counter(objects.labels.tolist())
    return ", ".join(class_title(classes[label]) for label, _ in labels.most_common()) or "nothing"


def _draw_objects(axes: Axes, objects: Objects) -> None:
    """A box each, in the colour of its class: there may be many, so that names would hide them."""
    for (x0, y0, x1, y1), label in zip(objects.boxes.tolist(), objects.labels.tolist(), strict=True):
        colour = [value / 255 for value in class_colour(label)]
        axes.add_patch(Rectangle((x0 - 0.5, y0 - 0.5), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=0.9))


def _draw_boxes(axes: Axes, dataset: Dataset | DetectionDataset, index: int) -> None:
    if not isinstance(dataset, ArrayDataset) or dataset.boxes is None or dataset.kinds is None:
        return
    width, height = dataset.images.shape[2], dataset.images.shape[1]
    for (x0, y0, x1, y1), kind in zip(dataset.boxes[index].tolist(), dataset.kinds[index].tolist(), strict=True):
        # Pixel i covers i - 0.5 to i + 0.5; half a pixel of air lets the object's edge be seen, inside the image.
        x0, y0 = (max(start - 1, -0.2) for start in (x0, y0))
        x1, y1 = min(x1, width - 0.8), min(y1, height - 0.8)
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=BOX, linewidth=0.9))
        at_left, below = x0 < width / 2, y1 < 0.85 * height
        axes.text(
            max(x0, 0.2) if at_left else min(x1, width - 1.2),
            y1 + 0.6 if below else y0 - 0.6,
            dataset.kind_names[kind],
            color=BOX,
            fontsize=6,
            ha="left" if at_left else "right",
            va="top" if below else "bottom",
        )
