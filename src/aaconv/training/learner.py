"""A network with what changes its weights: one optimiser step after another, without waiting for the device."""

from collections.abc import Iterator
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from ..data.base_loader import mix
from ..recipes.recipe import Recipe
from ..tasks.task import Task
from ..utils.compiled_graphs import keep_all_graphs
from ..utils.distributed import World, communicating
from ..utils.precision import autocast
from ..utils.weights import Tensors
from .ghost_batch_norm import use_ghost_batch_norm
from .optimize import batch_norm_scales, load_optimizer, make_optimizer, make_schedule, optimizer_tensors, rate_of
from .parameter_groups import backbone_modules, backbone_parameters, head_parameters
from .running_sums import RunningSums

GRAPHED = ("reduce-overhead", "max-autotune")
"""The ways to compile that replay CUDA graphs, on a GPU."""


class Learner:
    """The network of a recipe, its moving average, optimiser, learning rate and precision.

    start: with the weights that the recipe starts from; without where others are loaded.
    """

    def __init__(self, recipe: Recipe, task: Task, world: World, steps_per_epoch: int, *, start: bool = True) -> None:
        self.recipe, self.task, self.world = recipe, task, world
        torch.manual_seed(mix(recipe.seed, 0))
        model = task.build(task.data_info(), start=start)
        if recipe.ghost_batch is not None:
            _check_ghost_batch(recipe, world)
            model = use_ghost_batch_norm(model, recipe.ghost_batch)
        model = world.prepare(model, sync_batch_norm=recipe.sync_batch_norm)
        if recipe.head == "zero":
            for parameter in head_parameters(model):
                torch.nn.init.zeros_(parameter)
        layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.model = model.to(world.device, memory_format=layout)  # type: ignore[call-overload]
        self.ema = ModelEmaV3(self.model, decay=recipe.ema) if recipe.ema is not None else None
        if recipe.compile != "off":
            keep_all_graphs()
            self.model.compile(mode=None if recipe.compile == "default" else recipe.compile, dynamic=False)
        self.net = world.wrap(self.model)
        self.optimizer = make_optimizer(recipe, self.model)
        self.backbone = backbone_parameters(self.model) if recipe.freeze_epochs else []
        self.frozen = False
        self.schedule = make_schedule(recipe, self.optimizer, steps_per_epoch)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=recipe.precision == "fp16")
        # From here on random numbers are dropout's, and each process draws its own.
        torch.manual_seed(mix(recipe.seed, 1, world.rank))

    def begin_epoch(self, epoch: int) -> None:
        """Training mode, with the backbone frozen in the recipe's first epochs."""
        self.net.train()
        if not self.recipe.freeze_epochs:
            return
        self.frozen = epoch < self.recipe.freeze_epochs
        for parameter in self.backbone:
            # Gradients that others wait for are computed, and left out of the step.
            parameter.requires_grad_(not self.frozen or self.world.size > 1)
        if self.frozen:
            for module in backbone_modules(self.model):
                if getattr(module, "running_mean", None) is not None:
                    module.eval()

    @property
    def eval_model(self) -> nn.Module:
        """What is evaluated: the moving average of the weights, where there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return rate_of(self.optimizer)

    def take_step(self, done: int, batch: Any, batches: Iterator[Any], sums: RunningSums) -> None:
        """The step that follows `done` others, on this batch and as many more as the recipe accumulates."""
        parts, parameters = self.recipe.accumulate, self.model.parameters()
        self.schedule.step_update(done)
        for part in range(parts):
            batch = next(batches) if part else batch
            with self.world.gradients(self.net, travel=part == parts - 1), communicating():
                with self.precision():
                    loss, metrics = self.task.loss(self.net, batch)
                self.scaler.scale(loss / parts if parts > 1 else loss).backward()
            sums.add(loss, metrics)
            if part == 0 and parts > 1 and self.recipe.compile in GRAPHED:
                self._own_gradients()
        if self.frozen:
            for parameter in self.backbone:
                parameter.grad = None
        if self.recipe.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(parameters, self.recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.model, step=done + 1)

    def _own_gradients(self) -> None:
        """Copy them. After the first part they lie in the memory of its CUDA graph, and the next part's replay would
        write over them; what later parts give is added to the copies."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def precision(self) -> torch.autocast:
        """Within it the network computes in the recipe's precision."""
        # No cache of casts under the compiler: inside a CUDA graph it would outlive the step.
        return autocast(self.recipe.precision, self.world.device, cache=self.recipe.compile == "off")

    def is_finite(self) -> bool:
        """Are all weights and statistics numbers? Waits for the device."""
        floats = [tensor for tensor in self.model.state_dict().values() if tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in floats]).all())

    def random_state(self) -> Tensors:
        """Of this process."""
        device = self.world.device
        state = {"cpu": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})

    def state(self, random: list[Tensors]) -> tuple[dict[str, Tensors], dict[str, Any]]:
        """Tensors, by file and name, and what JSON can hold; `random` is the random state of each process."""
        optimizer, rest = optimizer_tensors(self.optimizer)
        tensors = {"model": self.model.state_dict(), "optimizer": optimizer}
        tensors["random"] = {f"{rank}.{name}": one for rank, some in enumerate(random) for name, one in some.items()}
        if self.ema is not None:
            tensors["ema"] = self.ema.module.state_dict()
        return tensors, {"optimizer": rest, "scaler": self.scaler.state_dict()}

    def load(self, tensors: dict[str, Tensors], rest: dict[str, Any]) -> None:
        """Take back what `state` gave. Processes that were not there then keep their own random numbers."""
        if ("ema" in tensors) != (self.ema is not None):
            saved, wanted = ("averaged weights", "none") if self.ema is None else ("no averaged weights", "some")
            raise ValueError(f"it has {saved}, the recipe wants {wanted}: ema is another now")
        self.model.load_state_dict(tensors["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(tensors["ema"])
        new = batch_norm_scales(self.model)
        load_optimizer(self.optimizer, tensors["optimizer"], rest["optimizer"], new)
        self.scaler.load_state_dict(rest["scaler"])
        random, rank, device = tensors["random"], self.world.rank, self.world.device
        if f"{rank}.cpu" in random:
            torch.set_rng_state(random[f"{rank}.cpu"])
        if device.type == "cuda" and f"{rank}.cuda" in random:
            torch.cuda.set_rng_state(random[f"{rank}.cuda"], device)


def _check_ghost_batch(recipe: Recipe, world: World) -> None:
    images = recipe.batch // (world.size * recipe.accumulate)
    if recipe.ghost_batch is not None and images % recipe.ghost_batch:
        raise ValueError(
            f"ghost_batch must divide the images of a process and accumulation step, {images}, got {recipe.ghost_batch}"
        )
