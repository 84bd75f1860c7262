"""`aaconv demo`: a question that windows cannot answer, put to a small network without and with attention.

Each image of `shapes` shows two small objects, one near either edge: do they have the same colour? The networks of
models/aa_small.py are trained alike, by the recipes demo-plain, demo-se and demo-aa, with about the same number of
parameters. No window of their convolutions holds both objects, so that convolutions, averaged and classified linearly,
get three of four images right at best (data/shapes.py has the proof). SE brings the average over the image into every
channel, attention lets every pixel look at all others.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from . import recipes
from .data import ArrayDataset, Normalize, open_dataset, shapes
from .explore import write_page
from .layers.aaconv import AAConv2d
from .recipes.catalogue import DEMO_KINDS
from .recipes.recipe import Recipe
from .runs import curves, load, run_folder
from .training.run_lock import RunLock
from .training.trainer import train
from .utils import figures
from .utils.figures import GREY, INK, STYLE
from .utils.files import naming_unwritable
from .utils.terminal import new_table

BOUND = 75.0
"""Percent that convolutions with such windows can get right at best."""
CHANCE = 50.0
RUNS = Path("runs")
CURVES, ATTENTION, PAGE = "demo/curves.png", "demo/attention.png", "demo/attention.html"
FOR_THE_PAGE, LOOKED_AT = 4, 24  # images: on the page; of either class, to find those that look across

QUESTION = f"""\
Two small objects far apart: do they have the same colour? Guessing is right
for 50 % of the images, a network that sees one object at a time for {BOUND:.0f} % at
best. Three small networks of about the same size learn it, one after another.
"""


def run(runs: str | Path = RUNS, *, changes: dict[str, Any] | None = None) -> dict[str, float]:
    """Train the three networks into runs/demo-*, print what came out and draw it into runs/demo; returns the
    accuracies in percent.

    changes: fields of the recipes to override, as for a test that has no time.
    """
    runs, output = Path(runs), Console(highlight=False)
    pictures = (runs / PAGE).parent
    with naming_unwritable(pictures):
        pictures.mkdir(parents=True, exist_ok=True)
    with RunLock(pictures) as lock:
        lock.take()  # two demos would remove each other's runs
        return _run(runs, output, changes or {})


def _run(runs: Path, output: Console, changes: dict[str, Any]) -> dict[str, float]:
    output.print(QUESTION)
    summaries: dict[str, dict[str, Any]] = {}
    folders = []
    for number, (kind, title) in enumerate(DEMO_KINDS.items(), 1):
        recipe = recipes.override(recipes.get(f"demo-{kind}"), changes)
        folder = own_folder(runs, recipe)
        output.print(Text.assemble((f"{number}/{len(DEMO_KINDS)}  {title}", "bold"), (f"  {folder}", "dim")))
        with one_thread():
            summaries[title] = train(recipe, folder)
        folders.append(folder)
        output.print()
    output.print(side_by_side(summaries))
    accuracies = {title: summary["top1"] for title, summary in summaries.items()}
    output.print(f"\n{fill(conclusion(accuracies), min(output.width, 80))}\n", markup=False)

    augmented = folders[-1]
    curves.draw(folders, runs / CURVES)
    draw_attention(augmented, runs / ATTENTION)
    images, names = examples(FOR_THE_PAGE)
    write_page(augmented, images, runs / PAGE, names=names)
    output.print(Text(next_steps(runs)), soft_wrap=True)
    return accuracies


@contextmanager
def one_thread() -> Iterator[None]:
    """These layers are too small for more, and on a busy machine threads that wait for each other take many times as
    long: 50 images a second instead of 800."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def own_folder(runs: Path, recipe: Recipe) -> Path:
    """runs/NAME, emptied of an earlier demo; anything else that is there stays, and the folder gets a number."""
    folder, number = runs / recipe.name, 1
    while folder.exists():
        if run_folder.is_run(folder) and recipes.load(folder / run_folder.RECIPE).name == recipe.name:
            with RunLock(folder) as lock:
                lock.take()  # `aaconv train --resume` may be at it
                shutil.rmtree(folder)
            break
        number += 1
        folder = runs / f"{recipe.name}-{number}"
    return folder


def side_by_side(summaries: dict[str, dict[str, Any]]) -> Table:
    numbers = ("parameters", "right", "seconds")
    table = new_table("network", *numbers, right=numbers)
    best = max(summary["top1"] for summary in summaries.values())
    for title, summary in summaries.items():
        seconds = summary["seconds_per_epoch"] * summary["epochs"]
        style = "bold green" if summary["top1"] == best else ""
        right = Text(f"{summary['top1']:.1f} %", style)
        table.add_row(title, f"{summary['parameters']:,}", right, f"{seconds:.0f}")
    return table


def conclusion(accuracies: dict[str, float]) -> str:
    """What was shown, in two sentences, whatever came out."""
    plain, se, aa = accuracies.values()
    held = "stay at chance, below" if abs(plain - CHANCE) <= 5 else "stay below" if plain <= BOUND else "pass"
    if aa - plain > 1:
        attention = f"with attention beside them they are right in {aa:.1f} %, at the same size"
    else:
        attention = f"attention beside them changes that to {aa:.1f} % only, in this short run"
    away = (
        "within a point of that"
        if abs(aa - se) <= 1
        else f"{abs(aa - se):.1f} points {'below' if se < aa else 'above'}"
    )
    return (
        f"Convolutions alone {held} the {BOUND:.0f} % that their windows allow ({plain:.1f} %); {attention}. "
        f"SE, which hands every channel the average over the image, ends {away}, and deeper convolutions, with windows "
        "as wide as the image, could learn the task as well."
    )


def next_steps(runs: Path) -> str:
    return f"""\
Look at    {runs / CURVES}, {runs / ATTENTION} (where the heads look),
           {runs / PAGE} (open it in a browser and click)
Try next   aaconv train demo-aa --model.position none (without positions),
           aaconv report {runs}/demo-* (a page about the three runs),
           aaconv recipes (the paper's experiments)"""


def examples(number: int) -> tuple[list[Tensor], list[str]]:
    """Test images [3, height, width] that no network was trained on, and what they show."""
    dataset = _test_images(number)
    return [dataset[index][0] for index in range(number)], [dataset.classes[label] for label in dataset.labels]


def _test_images(number: int) -> ArrayDataset:
    dataset = open_dataset("shapes", split="test", number=number)
    assert isinstance(dataset, ArrayDataset)
    return dataset


def _box(dataset: ArrayDataset, index: int, which: int) -> Tensor:
    assert dataset.boxes is not None
    return dataset.boxes[index, which]


@dataclass(frozen=True)
class Look:
    """What the heads of a layer attend to from the middle of one object (0 or 1) of a test image."""

    index: int
    which: int
    maps: Tensor
    """[heads, height, width]"""
    guess: int
    shares: tuple[float, ...]
    """Of each head, the part of its weight that lies on the other object."""

    @property
    def across(self) -> float:
        return sum(self.shares) / len(self.shares)


def draw_attention(run: str | Path, path: str | Path) -> Path:
    """Where each head of one layer looks from a pixel of one object, in one image of either class.

    Shown are the layer whose heads look most at the other object, and of each class the image and the object from which
    they do so most.
    """
    loaded = load.load_model(run)
    layers = {name: layer for name, layer in loaded.model.named_modules() if isinstance(layer, AAConv2d)}
    dataset = _test_images(8 * LOOKED_AT)
    normalize = Normalize(loaded.mean, loaded.std)
    classes = [(dataset.labels == label).nonzero().flatten()[:LOOKED_AT].tolist() for label in (1, 0)]

    def look(layer: AAConv2d, index: int, which: int) -> Look:
        image = normalize(dataset[index][0][None])
        maps, guess = attention_from(loaded.model, layer, image, _centre(dataset, index, which))
        other = _box(dataset, index, 1 - which)
        return Look(index, which, maps, guess, tuple(share(head, other, dataset.images.shape[1]) for head in maps))

    def looks(layer: AAConv2d) -> list[list[Look]]:
        return [[look(layer, index, which) for index in indices for which in (0, 1)] for indices in classes]

    found = {name: looks(layer) for name, layer in layers.items()}
    name = max(found, key=lambda name: _mean(one.across for looks in found[name] for one in looks))
    figures.write(lambda: _panels(name, found[name], dataset), Path(path), STYLE | {"axes.grid": False})
    return Path(path)


def _panels(name: str, found: list[list[Look]], dataset: ArrayDataset) -> Figure:
    chosen = [max(looks, key=lambda look: look.across) for looks in found]
    heads = len(chosen[0].shares)
    figure = Figure(figsize=(1.75 * (heads + 1) + 0.2, 2.02 * len(chosen) + 1.2), layout="constrained")
    title = f"From the ring, where do the heads of {name} look?"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    figure.supxlabel(_caption(found), x=0.01, ha="left", fontsize=9, color=GREY)
    for row, look in zip(figure.subplots(len(chosen), heads + 1), chosen, strict=True):
        _show_image(row[0], dataset, look.index, look.which, look.guess)
        for head, axes in enumerate(row[1:]):
            _show_head(axes, dataset, look, head)
    return figure


def _caption(found: list[list[Look]]) -> str:
    everything = [look for looks in found for look in looks]
    usual, most = _mean(look.across for look in everything), _mean(max(look.shares) for look in everything)
    return (
        f"The examples that look across most, of {LOOKED_AT} test images per class. On average over all of "
        f"them and both objects,\n{100 * usual:.0f} % of a head's weight is on the other object, "
        f"and {100 * most:.0f} % of the weight of the head that has most there."
    )


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


@torch.no_grad()
def attention_from(
    model: torch.nn.Module, layer: AAConv2d, image: Tensor, point: tuple[float, float]
) -> tuple[Tensor, int]:
    """The weights [heads, height, width] of the pixel of the map that `point` (x, y of the image) lies in, and the
    class that the network says."""
    kept: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    guess = int(model(image).argmax())
    hook.remove()
    maps = layer.attention_maps(kept[0])[0]
    height, width = layer.attention_size(*kept[0].shape[-2:])
    x, y = (
        int(place * cells / length)
        for place, cells, length in zip(point, (width, height), image.shape[:1:-1], strict=True)
    )
    return maps[:, y * width + x].unflatten(-1, (height, width)), guess


def _centre(dataset: ArrayDataset, index: int, which: int) -> tuple[float, float]:
    x0, y0, x1, y1 = _box(dataset, index, which).tolist()
    return (x0 + x1) / 2, (y0 + y1) / 2


def _show_image(axes: Any, dataset: ArrayDataset, index: int, which: int, guess: int) -> None:
    axes.imshow(dataset.images[index].numpy())
    label = int(dataset.labels[index])
    axes.set_title(dataset.classes[label], fontsize=10.5, color=INK)
    verdict = "the network agrees" if guess == label else f'the network says "{dataset.classes[guess]}"'
    axes.set_xlabel(verdict, fontsize=9, color=GREY)
    _ring(axes, dataset, index, which)


def _show_head(axes: Any, dataset: ArrayDataset, look: Look, head: int) -> None:
    """One map over the image in grey, and how much of it lies on the other object."""
    size = dataset.images.shape[1]
    axes.imshow(dataset.images[look.index].float().mean(-1).numpy(), cmap="gray", vmin=0, vmax=255)
    whole = (-0.5, size - 0.5, size - 0.5, -0.5)
    axes.imshow(look.maps[head].numpy(), cmap="inferno", alpha=0.72, extent=whole, interpolation="bilinear", vmin=0)
    axes.set_title(f"head {head + 1}", fontsize=10.5, color=INK)
    axes.set_xlabel(f"{100 * look.shares[head]:.0f} % on the other", fontsize=9, color=GREY)
    x0, y0, x1, y1 = _box(dataset, look.index, 1 - look.which).tolist()
    axes.add_patch(Rectangle((x0 - 1, y0 - 1), x1 - x0 + 1, y1 - y0 + 1, fill=False, edgecolor="white", linewidth=0.9))
    _ring(axes, dataset, look.index, look.which)


def share(weights: Tensor, box: Tensor, size: int) -> float:
    """The part of the weights [height, width] that lies on cells which the box x0, y0, x1, y1 touches."""
    cell_height, cell_width = size / weights.shape[0], size / weights.shape[1]
    x0, y0, x1, y1 = box.tolist()
    rows = slice(int(y0 // cell_height), -int(-y1 // cell_height))
    columns = slice(int(x0 // cell_width), -int(-x1 // cell_width))
    return float(weights[rows, columns].sum() / weights.sum())


def _ring(axes: Any, dataset: ArrayDataset, index: int, which: int) -> None:
    x, y = _centre(dataset, index, which)
    axes.add_patch(
        Circle(
            (x - 0.5, y - 0.5),
            max(shapes.sides(dataset.images.shape[1])) / 2 + 0.6,
            fill=False,
            edgecolor="white",
            linewidth=1.6,
        )
    )
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
