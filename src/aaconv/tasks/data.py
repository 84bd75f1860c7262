"""The images of a recipe: opened, limited, and some held out of training."""

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from typing_extensions import Self

from ..data import ArrayDataset, Dataset, open_dataset
from ..data.coco import DetectionDataset
from ..models import create_without_memory
from ..recipes.recipe import Model, Recipe

LARGE = 224


HOLDOUT_SEED = 1


class Takes(Protocol):
    """A data set that can give some of its images."""

    def __len__(self) -> int: ...

    def take(self, number: int, seed: int = 0) -> Self: ...


Images = TypeVar("Images", bound=Takes)
AnyData = TypeVar("AnyData", bound=Dataset | DetectionDataset)


def open_data(recipe: Recipe) -> tuple[Dataset, Dataset]:
    """What a recipe trains on and what it evaluates on, limits and held-out images considered."""
    train = open_dataset(recipe.data, recipe.data_dir, "train", **shapes_options(recipe, train=True))
    if recipe.holdout:
        train, test = (select(train, indices) for indices in hold_out(recipe, len(train)))
    else:
        test = open_dataset(recipe.data, recipe.data_dir, "test", **shapes_options(recipe, train=False))
        if len(test.classes) > len(train.classes):
            raise ValueError(
                f"{recipe.data}: the test images have labels up to {len(test.classes) - 1}, the training images up to "
                f"{len(train.classes) - 1}; a classes.txt beside the shards names all classes"
            )
    return limited_both(recipe, train, test)


def normalized(recipe: Recipe, train: AnyData, test: AnyData) -> tuple[AnyData, AnyData]:
    """With the mean and deviation that the recipe wants: the data's own, or those of its network's weights."""
    if recipe.normalize == "data":
        return train, test
    mean, std = _statistics_of(recipe.model)
    return replace(train, mean=mean, std=std), replace(test, mean=mean, std=std)


def _statistics_of(model: Model) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the images that the weights of a network were trained on."""
    known = getattr(create_without_memory(model.name, **model.network_options), "pretrained_cfg", None) or {}
    return tuple(known.get("mean") or IMAGENET_DEFAULT_MEAN), tuple(known.get("std") or IMAGENET_DEFAULT_STD)


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


def hold_out(recipe: Recipe, images: int) -> tuple[Tensor, Tensor]:
    """The indices of the training images that are left, and of those that are kept apart to evaluate on."""
    number, fold = recipe.holdout, recipe.fold
    if not 0 < number < images:
        raise ValueError(f"holdout must be 0 to {images - 1}, the images less one, got {number}")
    if (fold + 1) * number > images:
        raise ValueError(f"{images} images have folds 0 to {images // number - 1} of {number}, got fold={fold}")
    order = torch.randperm(images, generator=torch.Generator().manual_seed(HOLDOUT_SEED))
    held_out = slice(fold * number, (fold + 1) * number)
    return torch.cat([order[: held_out.start], order[held_out.stop :]]).sort().values, order[held_out]


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
    return recipe.size or dataset.side or LARGE


def shapes_options(recipe: Recipe, *, train: bool) -> dict[str, Any]:
    """shapes are drawn in the size that is wanted, and no more of them than are."""
    if recipe.data.partition(":")[0] != "shapes":
        return {}
    limit = recipe.train_limit if train else recipe.eval_limit
    number = None if limit is None else limit + (recipe.holdout if train else 0)
    wanted = {"size": recipe.size, "number": number}
    return {name: value for name, value in wanted.items() if value is not None}
