"""`aaconv bench train`: an epoch of the training loop against its bare compiled steps.

The loop is the one of `aaconv train`, with its loader, augmentation, learning rate, sums, display and signals. The bare
steps are forward, backward and optimiser on one batch that lies on the device, with the same compiled network. Both are
timed in turn; what the loop takes on top of the steps is what the rest costs. All images lie on the device: CIFAR's are
cut and mirrored there, those of another size as recipes with `in_memory` do it, which change the light as well.
"""

import io
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from ..data import ArrayDataset, CropAndFlip, Dataset
from ..data.datasets import CIFAR_STATISTICS
from ..data.transforms import EVAL_CROP
from ..recipes.recipe import Model, Recipe
from ..tasks.classify import Classify
from ..training.progress import Display
from ..training.trainer import Trainer, settings
from ..utils.device import pick_device
from ..utils.distributed import World
from .measure import Timing
from .model import Network
from .output import Progress, Results
from .switches import restoring_switches

IMAGES = {"cuda": 50_000, "cpu": 96}
BATCH = {"cuda": 1024, "cpu": 16}
MODEL = {"cuda": "plain_wrn28_10", "cpu": "plain_wrn16_4"}
ROUNDS = {"cuda": 5, "cpu": 3}


class RandomImages(Classify):
    """Noise, where the real images are not there: in the size of CIFAR-100's, or larger than the recipe's, so that
    parts of it are taken, as of files."""

    @cached_property
    def data(self) -> tuple[Dataset, Dataset]:
        side = int(self.recipe.size / EVAL_CROP) + 1 if self.recipe.size else 32
        train, test = self.recipe.train_limit or IMAGES["cuda"], self.recipe.eval_limit or 1024
        return _noise(train, 0, side), _noise(test, 1, side)


def _noise(number: int, seed: int, side: int = 32) -> ArrayDataset:
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (number, side, side, 3), generator=random, dtype=torch.uint8)
    labels = torch.randint(100, (number,), generator=random)
    classes = tuple(str(label) for label in range(100))
    return ArrayDataset("noise", images, labels, classes, *CIFAR_STATISTICS["cifar100"], CropAndFlip())


@restoring_switches()
def run(
    model: str | None = None,
    *,
    data_dir: str | None = None,
    size: int | None = None,
    batch: int | None = None,
    images: int | None = None,
    compile_mode: str | None = None,
    precision: str = "bf16",
    device: str | None = None,
    rounds: int | None = None,
    json_to: str | None = None,
) -> None:
    """Measure and print a table. model: NAME or NAME:option=value; size: of the images, by default CIFAR's; images: of
    an epoch."""
    if size and data_dir:
        raise ValueError(f"size={size} is of noise, data_dir={data_dir} has CIFAR-100: drop --size or --data-dir")
    where = pick_device(device)
    network = Network.parse(model or MODEL[where.type])
    rounds = rounds or ROUNDS[where.type]
    recipe = Recipe(
        name="bench-train",
        summary="an epoch of training, timed",
        model=Model(network.name, network.options),
        data="cifar100",
        data_dir=data_dir,
        size=size,
        in_memory=size is not None,
        epochs=rounds + 1,
        batch=batch or BATCH[where.type],
        train_limit=images or (IMAGES["cpu"] if where.type == "cpu" else None),
        eval_limit=1024 if where.type == "cuda" else 32,
        lr=1e-4,  # noise must not make the loss explode
        precision=precision,  # type: ignore[arg-type]
        compile=compile_mode or ("default" if where.type == "cuda" else "off"),  # type: ignore[arg-type]
    )
    if size:
        data = f"noise of {size} x {size}, on the device"
    else:
        data = "CIFAR-100" if data_dir else "noise of CIFAR-100's size (--data-dir names the real images)"
    settings_of = {name: getattr(recipe, name) for name in ("size", "batch", "precision", "compile", "channels_last")}
    results = Results("train", where, json_to, data=data, rounds=rounds, **settings_of)
    results.add(measure(recipe, where, rounds, Progress()))
    _print(results, recipe, data)


def measure(recipe: Recipe, device: torch.device, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Epochs of the loop and as many bare steps, in turn; the first of each compiles and does not count."""
    task = Classify(recipe) if recipe.data_dir else RandomImages(recipe)
    with tempfile.TemporaryDirectory(prefix="aaconv-bench-") as folder, settings(recipe):
        trainer = Trainer(recipe, Path(folder) / "run", World(device), task=task)
        terminal = Console(file=io.StringIO(), force_terminal=True)
        trainer.display = Display(recipe, trainer.steps_per_epoch, console=terminal)
        steps, loop, bare, rest = trainer.steps_per_epoch, [], [], []
        take_steps = _bare_steps(trainer)
        with trainer.display:
            for number in range(rounds + 1):
                progress(f"epoch {number} of {rounds}" if number else "compiling")
                start = time.perf_counter()
                trainer.train_epoch()
                trainer.finish_epoch()
                whole = time.perf_counter() - start
                alone = take_steps(steps if number else 3)
                if number:
                    loop.append(1e3 * trainer.speed[-1]["seconds"])
                    bare.append(1e3 * alone)
                    rest.append(1e3 * whole - loop[-1])
        peak = trainer.speed[-1]["peak_memory_bytes"]
    timings = {"epoch_ms": Timing.of(loop), "bare_ms": Timing.of(bare), "evaluation_and_checkpoint_ms": Timing.of(rest)}
    return {
        "model": recipe.model.name,
        "options": recipe.model.options,
        "steps": steps,
        **{name: vars(timing) for name, timing in timings.items()},
        "epoch_to_bare": timings["epoch_ms"].p50 / timings["bare_ms"].p50,
        "images_per_second": 1e3 * steps * recipe.batch / timings["epoch_ms"].p50,
        "peak_bytes": peak,
    }


def _bare_steps(trainer: Trainer) -> Callable[[int], float]:
    """What takes a number of steps on one batch and says how many seconds they took."""
    learner, device = trainer.learner, trainer.world.device
    images, labels = next(trainer.train_loader.batches())
    images, labels = images.clone(memory_format=torch.preserve_format), labels.clone()

    def take(steps: int) -> float:
        learner.net.train()
        start = time.perf_counter()
        for _ in range(steps):
            with learner.precision():
                loss = F.cross_entropy(learner.net(images).float(), labels)
            loss.backward()
            learner.optimizer.step()
            learner.optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return take


def _print(results: Results, recipe: Recipe, data: str) -> None:
    columns = ["model", "steps", "epoch s", "p20 - p80", "bare steps s", "p20 - p80", "ratio", "images/s", "peak"]
    cells = []
    for row in results.rows:
        line = [str(Network(row["model"], row["options"])), str(row["steps"])]
        for name in ("epoch_ms", "bare_ms"):
            p20, p50, p80 = (row[name][key] / 1e3 for key in ("p20", "p50", "p80"))
            line += [f"{p50:.3f}", f"{p20:.3f} - {p80:.3f}"]
        ratio, speed = f"{row['epoch_to_bare']:.3f}", f"{row['images_per_second']:,.0f}"
        cells.append([*line, ratio, speed, f"{row['peak_bytes'] / 2**30:.2f} GiB"])
    rest = results.rows[0]["evaluation_and_checkpoint_ms"]["p50"] / 1e3
    compiled = "not compiled" if recipe.compile == "off" else f"torch.compile {recipe.compile}"
    about = f"batch {recipe.batch}, {recipe.precision}, {compiled}; {data}"
    results.finish(
        columns, cells, [about, f"an evaluation and a checkpoint after each epoch: {rest:.2f} s, not counted"]
    )
