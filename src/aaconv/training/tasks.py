"""What a kind of training has to bring, so that one loop serves them all: a network, batches, a loss, an evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..data import ArrayDataset, Dataset, open_dataset
from ..recipes.recipe import Recipe
from .distributed import World

LARGE = 224
HOLDOUT_SEED = 1

Images = TypeVar("Images")


@dataclass(frozen=True)
class Facts:
    """What of the data a network is built for, and what it takes to use the network without them."""

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int
    """Height and width of the images."""


class Loader(Protocol):
    """Batches on a device that depend on the seed, the epoch and the step alone; see aaconv.data.loaders."""

    def __len__(self) -> int: ...

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]: ...


class Task(ABC):
    """One kind of training, for one recipe. A batch is whatever the task's own loaders give.

    headline   the metric of `evaluate` that decides which weights are the best; more is better
    metrics    the names of what `evaluate` gives, the columns of metrics.csv
    running    the names of what `loss` gives besides the loss: columns, too, with train_ before them. The first is what
               the display calls accuracy, in percent; none: it shows the loss alone
    """

    headline: str
    metrics: tuple[str, ...]
    running: tuple[str, ...] = ()

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def facts(self) -> Facts:
        """Opens the data, once."""

    @abstractmethod
    def build(self, facts: Facts) -> nn.Module:
        """The network with fresh weights; the data need not be there."""

    @abstractmethod
    def loaders(self, batch: int, world: World) -> tuple[Loader, Loader]:
        """Training and evaluation, `batch` images a step and process; both for this process's part of the images."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a batch, and each of `running` as a mean over it: scalars on the device, never read here."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float | None]:
        """`metrics` of the network, in evaluation mode, over all batches of all processes (distributed.total).

        All processes give the same; None is what could not be measured.
        """

    def config(self, facts: Facts) -> dict[str, Any]:
        """config.json of a run folder, in timm's layout: timm.create_model("local-dir:RUN") builds the network."""
        return {
            "architecture": self.recipe.model.name.partition(".")[0],
            "num_classes": len(facts.classes),
            "label_names": list(facts.classes),
            "model_args": dict(self.recipe.model.options),
            "pretrained_cfg": {
                "input_size": [3, facts.size, facts.size],
                "mean": list(facts.mean),
                "std": list(facts.std),
                "num_classes": len(facts.classes),
            },
            "task": self.recipe.task,
        }


def create_task(recipe: Recipe) -> Task:
    """The task that a recipe names."""
    match recipe.task:
        case "classify":
            from ..classify import Classify

            return Classify(recipe)
        case "detect":
            from ..detect import Detect

            return Detect(recipe)
    raise ValueError(f"task must be classify or detect, got {recipe.task!r}")


def open_data(recipe: Recipe) -> tuple[Dataset, Dataset]:
    """What a recipe trains on and what it evaluates on, limits and held-out images considered."""
    train = open_dataset(recipe.data, recipe.data_dir, "train", **shapes_options(recipe, train=True))
    if recipe.holdout:
        train, test = (select(train, indices) for indices in hold_out(recipe.holdout, len(train)))
    else:
        test = open_dataset(recipe.data, recipe.data_dir, "test", **shapes_options(recipe, train=False))
    return limited_both(recipe, train, test)


def limited_both(recipe: Recipe, train: Images, test: Images) -> tuple[Images, Images]:
    """Of each part as many images as the recipe trains and evaluates on."""
    # Often a limit is one that the recipe came with, and --holdout or other data have made too large.
    every = "aaconv train --{} none takes them all"
    return (
        limited("train_limit", train, recipe.train_limit, every.format("train-limit")),
        limited("eval_limit", test, recipe.eval_limit, every.format("eval-limit")),
    )


def as_evaluated(recipe: Recipe, test: Images) -> Images:
    """The test images that a run of the recipe evaluates on."""
    return limited("eval_limit", test, recipe.eval_limit, f"aaconv eval RUN --data {recipe.data} takes them all")


def hold_out(number: int, images: int) -> tuple[Tensor, Tensor]:
    """The indices of the training images that are left, and of the `number` that are kept apart to evaluate on."""
    if not 0 < number < images:
        raise ValueError(f"holdout must be 0 to {images - 1}, the images less one, got {number}")
    order = torch.randperm(images, generator=torch.Generator().manual_seed(HOLDOUT_SEED))
    return order[number:].sort().values, order[:number]


def limited(name: str, dataset: Images, limit: int | None, way_out: str) -> Images:
    """As many of the images as the field `name` of a recipe says, None: all of them; `way_out` of there being fewer."""
    if limit is None:
        return dataset
    if not 1 <= limit <= len(dataset):
        raise ValueError(
            f"the recipe's {name} must be 1 to {len(dataset)}, the number of images, got {limit}; {way_out}"
        )
    return dataset.take(limit)


def select(dataset: Dataset, indices: Tensor) -> Dataset:
    """The images with these indices, int64 [number]."""
    if isinstance(dataset, ArrayDataset):
        arrays = {name: getattr(dataset, name) for name in ("images", "labels", "boxes", "kinds")}
        return replace(dataset, **{name: array[indices] for name, array in arrays.items() if array is not None})
    return replace(dataset, chosen=indices if dataset.chosen is None else dataset.chosen[indices])


def image_size(recipe: Recipe, dataset: Dataset) -> int:
    """Height and width of the images that the network sees."""
    if recipe.size is not None:
        return recipe.size
    return dataset.images.shape[1] if isinstance(dataset, ArrayDataset) else LARGE


def shapes_options(recipe: Recipe, *, train: bool) -> dict[str, Any]:
    """shapes are drawn in the size that is wanted, and no more of them than are."""
    if recipe.data != "shapes":
        return {}
    limit = recipe.train_limit if train else recipe.eval_limit
    number = None if limit is None else limit + (recipe.holdout if train else 0)
    wanted = {"size": recipe.size, "number": number}
    return {name: value for name, value in wanted.items() if value is not None}
