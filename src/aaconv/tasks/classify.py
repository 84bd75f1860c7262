"""Classification: cross entropy, top-1 and top-5."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Dataset, make_loader, takes_whole_images
from ..data.policy import Policy
from ..data.transforms import EVAL_CROP
from ..models import list_models
from ..models.augmented import NAME as AUGMENTED
from ..utils.distributed import World, total
from .data import image_size, normalized, open_data
from .evaluation import outputs_over
from .task import DataInfo, Loader, Task

Batch = tuple[Tensor, Tensor]


class Classify(Task):
    """Batches are (images [batch, 3, size, size], labels int64 [batch]), or float [batch, classes] of mixed images."""

    headline = "top1"
    metrics = ("loss", "top1", "top5")
    running = ("top1",)

    @cached_property
    def data(self) -> tuple[Dataset, Dataset]:
        """The images of training and of evaluation."""
        return normalized(self.recipe, *open_data(self.recipe))

    def data_info(self) -> DataInfo:
        train, _ = self.data
        return DataInfo(train.classes, tuple(train.mean), tuple(train.std), image_size(self.recipe, train))

    def build(self, info: DataInfo, *, start: bool = False) -> nn.Module:
        own_size = _own_size(self.recipe.model.name, info)
        if twice := own_size.keys() & self.recipe.model.options.keys():
            raise ValueError(f"the option {min(twice)} follows from the size of the images; set that with --size")
        network = self.create(info, start, **own_size)
        if hasattr(network, "anchors"):
            name = self.recipe.model.name
            raise ValueError(f"{name} is a detector, not a classifier; `aaconv recipes` lists those that train one")
        return network

    def config(self, info: DataInfo) -> dict[str, Any]:
        config = super().config(info)
        config["model_args"] |= _own_size(self.recipe.model.name, info)
        config["pretrained_cfg"]["crop_pct"] = 1.0 if takes_whole_images(self.data[0], info.size) else EVAL_CROP
        return config

    def loaders(self, batch: int, world: World) -> tuple[Loader, Loader]:
        recipe = self.recipe
        train, test = (
            make_loader(
                images,
                batch,
                train=training,
                size=recipe.size,
                workers=recipe.workers,
                max_unreadable=recipe.max_unreadable,
                in_memory=recipe.in_memory,
                device=world.device,
                seed=recipe.seed,
                policy=self._policy,
                rank=world.rank,
                world_size=world.size,
            )
            for images, training in zip(self.data, (True, False), strict=True)
        )
        return train, test

    @property
    def _policy(self) -> Policy:
        recipe = self.recipe
        return Policy(
            auto=recipe.auto_augment,
            erasing=recipe.random_erasing,
            mixup=recipe.mixup,
            cutmix=recipe.cutmix,
            repeats=recipe.repeats,
            smoothing=recipe.label_smoothing,
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        logits = model(images)
        mixed = labels.is_floating_point()  # and smoothed already
        smoothing = 0.0 if mixed else self.recipe.label_smoothing
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
        correct = (logits.detach().argmax(1) == (labels.argmax(1) if mixed else labels)).float().mean()
        return loss, {"top1": 100 * correct}

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float | None]:
        return {**count(model, batches, len(self.data_info().classes)).metrics()}


@dataclass(frozen=True)
class ClassificationCounts:
    """Sums over the images of all processes: float64 [4] of their number, losses, hits and hits among five; and of this
    process `guesses` int64 [images, 2], the label of each image and the class it was taken for."""

    sums: Tensor
    guesses: Tensor

    def metrics(self) -> dict[str, float]:
        """The mean loss; top1 and top5 in percent."""
        number, loss, top1, top5 = self.sums.tolist()
        if number == 0:
            raise ValueError("there is no image to evaluate on")
        return {"loss": loss / number, "top1": 100 * top1 / number, "top5": 100 * top5 / number}


@torch.no_grad()
def count(model: nn.Module, batches: Iterable[Batch], classes: int) -> ClassificationCounts:
    """Every image of every process once."""
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    guesses = [torch.empty(0, 2, dtype=torch.int64, device=device)]
    for _, labels, logits in outputs_over(model, batches):
        best = logits.topk(min(5, classes), dim=1).indices
        hits = best == labels[:, None]
        losses = F.cross_entropy(logits, labels, reduction="none").double()
        sums += torch.stack([torch.full_like(losses, 1.0), losses, hits[:, 0].double(), hits.any(1).double()]).sum(1)
        guesses.append(torch.stack([labels, best[:, 0]], dim=1))
    return ClassificationCounts(total(sums), torch.cat(guesses))


def _own_size(name: str, info: DataInfo) -> dict[str, int]:
    """The keyword for the networks that are made for one size of image."""
    if name == AUGMENTED or name in list_models():
        return {"img_size": info.size}
    known = None if ":" in name or not timm.is_model(name.partition(".")[0]) else timm.get_pretrained_cfg(name)
    return {"img_size": info.size} if known is not None and known.fixed_input_size else {}
