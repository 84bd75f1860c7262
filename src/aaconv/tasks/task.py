"""What a kind of training has to bring, so that one loop serves them all: a network, batches, a loss, an evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ..data.transforms import INTERPOLATION
from ..models import create_model
from ..models.weights import options_of_name
from ..recipes.recipe import Recipe
from ..utils.distributed import World
from ..utils.errors import one_line
from ..utils.hub_access import hub_weights
from ..utils.weights_folder import weights_folder
from .pretrained_file import check_loaded, file_of, misfit, watching_loads, with_weights


@dataclass(frozen=True)
class DataInfo:
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
    def data_info(self) -> DataInfo:
        """Opens the data, once."""

    @abstractmethod
    def build(self, info: DataInfo, *, start: bool = False) -> nn.Module:
        """The network with fresh weights; start: with those that the recipe starts from. The data need not be there."""

    def create(self, info: DataInfo, start: bool, **options: Any) -> nn.Module:
        """timm's create_model with the recipe's keywords over these; whatever a constructor raises is a ValueError."""
        model = self.recipe.model
        base, file = model.base, file_of(model) if start else None
        options |= model.network_options if not start else model.options if file is None else with_weights(model, file)
        from_hub = options.get("pretrained") and not options.get("pretrained_cfg_overlay")
        place = weights_folder() / f"{base.partition('.')[0]}.safetensors"
        way_out = f"put a file of them at {place} and start again, or name one with --pretrained FILE"
        try:
            with hub_weights(base, way_out) if from_hub else nullcontext(), watching_loads() as loads:
                network = create_model(model.name, num_classes=len(info.classes), **options)
        except (MemoryError, ConnectionError):
            raise
        except Exception as error:  # each network has errors of its own
            if file is not None and "size mismatch" in str(error):
                raise ValueError(misfit(file, base, one_line(error))) from None
            given = str(model.options)[:200]
            raise ValueError(f"{model.name[:80]} cannot be built with {given}: {one_line(error)}") from None
        if file is not None:
            check_loaded(network, loads, file, base)
        getattr(network, "pretrained_cfg", {}).pop("state_dict", None)  # it is in the network
        return network

    @abstractmethod
    def loaders(self, batch: int, world: World) -> tuple[Loader, Loader]:
        """Training and evaluation, `batch` images per step and process; both for this process's part of the images."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of a batch, and each of `running` as a mean over it: scalars on the device, never read here."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float | None]:
        """`metrics` of the network, in evaluation mode, over all batches of all processes (distributed.total).

        All processes give the same; None is what could not be measured.
        """

    def config(self, info: DataInfo) -> dict[str, Any]:
        """config.json of a run folder, in timm's layout: timm.create_model("local-dir:RUN") builds the network."""
        return {
            "architecture": self.recipe.model.name.partition(".")[0],
            "num_classes": len(info.classes),
            "label_names": list(info.classes),
            "model_args": options_of_name(self.recipe.model.name) | self.recipe.model.network_options,
            "pretrained_cfg": {
                "input_size": [3, info.size, info.size],
                "mean": list(info.mean),
                "std": list(info.std),
                "num_classes": len(info.classes),
                "interpolation": INTERPOLATION,
            },
            "task": self.recipe.task,
        }


def create_task(recipe: Recipe) -> Task:
    """The task that a recipe names."""
    match recipe.task:
        case "classify":
            from .classify import Classify

            return Classify(recipe)
        case "detect":
            from .detect import Detect

            return Detect(recipe)
    raise ValueError(f"task must be classify or detect, got {recipe.task!r}")
