"""The optimiser and the learning rate of a recipe, both timm's."""

from collections.abc import Collection
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from ..recipes.recipe import Recipe
from ..utils.numbers import is_number
from .parameter_groups import parameter_groups

GROUP = "group-"
"""Before the number of a group, in the names of the tensors that are its own."""
LIKE_PARAMETERS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg")
"""What optimisers keep in the shape of the parameter; other tensors of theirs are of any shape."""


def peak_rate(recipe: Recipe) -> float:
    """The learning rate after the warm-up: `lr`, or the paper's rule, in proportion to the batch."""
    return recipe.lr if recipe.lr is not None else recipe.lr_base * recipe.batch / recipe.lr_base_size


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """timm's optimiser of that name; weight decay for all parameters, as in the paper, except `no_decay` and those
    that augment(combine="add") excludes."""
    groups = parameter_groups(recipe, model)
    parameters = [parameter for group in groups for parameter in group["params"]]
    options: dict[str, Any] = {}
    if recipe.optimizer in ("momentum", "sgd") and parameters[0].is_cuda:
        # One kernel, and no look at the gradients by the host where they are scaled.
        options["fused"] = True
    if recipe.eps is not None:
        options["eps"] = recipe.eps
    try:
        optimizer = create_optimizer_v2(
            groups,
            opt="sgd" if recipe.nesterov else recipe.optimizer,  # timm's "sgd" is "momentum" with Nesterov's
            lr=peak_rate(recipe),
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            **options,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"optimizer={recipe.optimizer!r} cannot be used: {error}") from None
    if "fused" in options and recipe.momentum:
        for parameter in parameters:
            # Where fp16 overflows in the very first step, fused SGD skips it and leaves the momentum uninitialised.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_schedule(recipe: Recipe, optimizer: Optimizer, steps_per_epoch: int) -> Scheduler:
    """`schedule.step_update(n)` sets the learning rate of the step that follows n others.

    It rises linearly from 0 over `warmup` of the epochs. Then "cosine" decays from the peak at the warm-up's end to
    min_lr after the last step; "step" multiplies by decay_rate at each of decay_epochs and "exponential" every
    decay_epochs[0] epochs, both counted from the beginning of the run.
    """
    if recipe.min_lr and recipe.schedule != "cosine":
        raise ValueError(f"min_lr is for the cosine schedule, got min_lr={recipe.min_lr} with {recipe.schedule!r}")
    total = recipe.epochs * steps_per_epoch
    warm_up = round(recipe.warmup * total)
    common: dict[str, Any] = {"warmup_t": warm_up, "warmup_lr_init": 0.0, "t_in_epochs": False}
    match recipe.schedule:
        case "cosine":
            if not 0 <= recipe.min_lr <= peak_rate(recipe):
                raise ValueError(f"min_lr must be 0 to the peak {peak_rate(recipe):g}, got {recipe.min_lr}")
            # At least 2: for a single step timm warns that there is nothing to fall.
            fall = max(2, total - warm_up)
            return CosineLRScheduler(optimizer, fall, lr_min=recipe.min_lr, warmup_prefix=True, **common)
        case "step":
            # timm decays one update before the one that is named.
            decays = [round(epoch * steps_per_epoch) + 1 for epoch in sorted(recipe.decay_epochs)]
            return MultiStepLRScheduler(optimizer, decays, recipe.decay_rate, warmup_prefix=False, **common)
        case "exponential":
            every = recipe.decay_epochs[0] * steps_per_epoch
            return StepLRScheduler(optimizer, every, recipe.decay_rate, warmup_prefix=False, **common)
        case "constant":
            return StepLRScheduler(optimizer, 1, 1.0, warmup_prefix=False, **common)
    raise ValueError(f"schedule must be cosine, step, exponential or constant, got {recipe.schedule!r}")


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate of parameters without a factor of their own."""
    first = optimizer.param_groups[0]
    return first["lr"] / first.get("lr_scale", 1.0)


def optimizer_tensors(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state in two parts: tensors by name, and the rest, which JSON can hold."""
    state = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            (tensors if isinstance(value, torch.Tensor) else numbers)[f"{index}.{name}"] = value
    groups = [dict(group) for group in state["param_groups"]]
    for index, group in enumerate(groups):
        for name in [name for name, value in group.items() if isinstance(value, torch.Tensor)]:
            tensors[f"{GROUP}{index}.{name}"] = group.pop(name)  # LAMB counts its steps so
    return tensors, {"numbers": numbers, "groups": groups}


def _checked_groups(own: list[dict[str, Any]], saved: Any) -> list[dict[str, Any]]:
    """The saved groups; what a newer torch has besides is as it is by default."""
    if not isinstance(saved, list) or len(saved) != len(own):
        raise ValueError(f"its optimizer has not {len(own)} groups of parameters")
    for ours, theirs in zip(own, saved, strict=True):
        if not isinstance(theirs, dict) or theirs.get("params") != ours["params"]:
            raise ValueError("its optimizer has other groups of parameters")
        if odd := sorted(map(str, theirs.keys() - ours.keys())):
            raise ValueError(f"its optimizer has {odd[0]!r}, that of the recipe has not: optimizer is another now")
        for name, value in theirs.items():
            if not _same_kind(ours[name], value):
                raise ValueError(f"the {name!r} of its optimizer is {str(value)[:40]!r}")
    return [ours | theirs for ours, theirs in zip(own, saved, strict=True)]


def _same_kind(ours: Any, theirs: Any) -> bool:
    """Are both numbers, or both truths, texts, lists? JSON makes lists of tuples; on another device a truth is None."""
    if ours is None or isinstance(ours, bool):
        return theirs is None or isinstance(theirs, bool) or (ours is None and is_number(theirs))
    if isinstance(ours, int | float):
        return is_number(theirs)
    if isinstance(ours, list | tuple):
        same_length = isinstance(theirs, list | tuple) and len(ours) == len(theirs)
        return same_length and all(map(_same_kind, ours, theirs))
    return isinstance(theirs, type(ours))


def _check_state(optimizer: Optimizer, state: dict[int, dict[str, Any]]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.items():
        shape = parameters[index].shape
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                fits = name not in LIKE_PARAMETERS or value.shape == shape
            else:
                fits = value is None or isinstance(value, bool | list) or is_number(value)
            if not fits:
                raise ValueError(f"the {name!r} of its optimizer does not fit parameter {index}, {list(shape)}")


def batch_norm_scales(model: nn.Module) -> set[nn.Parameter]:
    """The learned scales of a network's batch norms. Wide-ResNets of older checkpoints have the scale one, as a buffer:
    their weights load as they are, and `load_optimizer` is to know which parameters are new."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return {norm.weight for norm in norms if isinstance(norm.weight, nn.Parameter)}


def _places_before(optimizer: Optimizer, new: Collection[nn.Parameter], groups: Any) -> list[int] | None:
    """Where the parameters of a state from before the new ones are now; None where it has all of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [place for place, parameter in enumerate(parameters) if parameter not in new]
    if not new or not isinstance(groups, list) or sum(len(group["params"]) for group in groups) != len(kept):
        return None
    return kept


def _groups_with_new(own: list[dict[str, Any]], saved: list[dict[str, Any]], kept: list[int]) -> list[dict[str, Any]]:
    """The saved groups with the new parameters in them."""
    for ours, theirs in zip(own, saved, strict=True):
        if [place for place in ours["params"] if place in kept] != [kept[place] for place in theirs["params"]]:
            raise ValueError("its optimizer has other groups of parameters")
    return [theirs | {"params": ours["params"]} for ours, theirs in zip(own, saved, strict=True)]


def _values_with_new(optimizer: Optimizer, values: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """The saved values by the places of today, and zeros for the new parameters, at the step of the first one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = {key.partition(".")[2] for key in values if not key.startswith(GROUP)}
    found = {key: value for key, value in values.items() if key.startswith(GROUP)}
    for before, place in enumerate(kept):
        found |= {f"{place}.{name}": values[f"{before}.{name}"] for name in names if f"{before}.{name}" in values}
    first = {name: values[f"0.{name}"] for name in names if f"0.{name}" in values}
    for place in set(range(len(parameters))) - set(kept):
        zeros = {name: torch.zeros_like(parameters[place]) for name in first.keys() & set(LIKE_PARAMETERS)}
        found |= {f"{place}.{name}": value for name, value in (first | zeros).items()}
    return found


def load_optimizer(
    optimizer: Optimizer,
    tensors: dict[str, torch.Tensor],
    rest: dict[str, Any],
    new: Collection[nn.Parameter] = frozenset(),
) -> None:
    """Take back what `optimizer_tensors` gave; what is shaped like its parameter gets its memory layout, too.

    new: parameters that the state of an older checkpoint may lack; they begin with zeros.
    A ValueError where it is of another optimiser: that would train on, with whatever was saved.
    """
    state: dict[int, dict[str, Any]] = {}
    own, saved = optimizer.state_dict()["param_groups"], rest["groups"]
    kept = _places_before(optimizer, new, saved)
    groups = _checked_groups(own, saved if kept is None else _groups_with_new(own, saved, kept))
    values = {**tensors, **rest["numbers"]}
    values = values if kept is None else _values_with_new(optimizer, values, kept)
    for key, value in values.items():
        index, _, name = key.partition(".")
        if index.startswith(GROUP):
            groups[int(index.removeprefix(GROUP))][name] = value
        else:
            state.setdefault(int(index), {})[name] = value
    _check_state(optimizer, state)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value).requires_grad_(False)
