"""Which parameters are trained how: the factors of their learning rates, and their weight decay."""

from fnmatch import fnmatchcase
from typing import Any

from timm.optim import param_groups_layer_decay
from torch import nn

from ..layers import attention_parameters, no_weight_decay
from ..recipes.recipe import Recipe

Parameters = dict[str, nn.Parameter]


def parameter_groups(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """The parameters for an optimiser, together where factor and weight decay are the same; timm's schedules multiply
    the learning rate of a group by its `lr_scale`."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept, factors = _without_decay(recipe, model, named), _factors(recipe, model, named)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault((factors[name], name in kept), []).append(parameter)
    # Those with weight decay first: so the groups of a run without factors have always been.
    ordered = sorted(groups.items(), key=lambda item: item[0][1])
    one_rate = set(factors.values()) == {1.0}
    return [
        {"params": parameters} | ({} if one_rate else {"lr_scale": factor}) | ({"weight_decay": 0.0} if without else {})
        for (factor, without), parameters in ordered
    ]


def backbone_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All but those of the head and of attention."""
    others = _head(model) | attention_parameters(model)
    return [parameter for name, parameter in model.named_parameters() if name not in others]


def backbone_modules(model: nn.Module) -> list[nn.Module]:
    """All but those of the head."""
    head = {part for module in _head_modules(model) for part in module.modules()}
    return [module for module in model.modules() if module not in head]


def head_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of the last layer; of a detector all but the backbone's."""
    names = _head(model)
    return [parameter for name, parameter in model.named_parameters() if name in names]


def _without_decay(recipe: Recipe, model: nn.Module, named: Parameters) -> set[str]:
    kept = no_weight_decay(model) & named.keys()
    if recipe.decay == "matrices":
        own = set(getattr(model, "no_weight_decay", set)())
        kept |= {name for name, parameter in named.items() if parameter.dim() < 2 or name in own}
    for pattern in recipe.no_decay:
        found = {name for name in named if fnmatchcase(name, pattern)}
        if not found:
            like = next(iter(named))
            raise ValueError(f"no_decay: no weight of {recipe.model.name} is called {pattern!r}, as {like!r} is")
        kept |= found
    return kept


def _factors(recipe: Recipe, model: nn.Module, named: Parameters) -> dict[str, float]:
    if recipe.layer_decay is None and recipe.lr_backbone == recipe.lr_attention == 1:
        return dict.fromkeys(named, 1.0)
    attention, head = attention_parameters(model), _head(model)
    depth = _layer_factors(recipe, model)

    def factor(name: str, parameter: nn.Parameter) -> float:
        if name in attention:
            return recipe.lr_attention
        return 1.0 if name in head else recipe.lr_backbone * depth.get(parameter, 1.0)

    return {name: factor(name, parameter) for name, parameter in named.items()}


def _layer_factors(recipe: Recipe, model: nn.Module) -> dict[nn.Parameter, float]:
    if recipe.layer_decay is None:
        return {}
    if not hasattr(model, "group_matcher"):
        raise ValueError(f"layer_decay needs a network that knows its layers, as timm's do, not {recipe.model.name}")
    groups = param_groups_layer_decay(model, layer_decay=recipe.layer_decay)
    return {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}


def _head(model: nn.Module) -> set[str]:
    """The names of the head's parameters."""
    modules = _head_modules(model)
    names = [name for name, module in model.named_modules() if module in modules]
    return {f"{name}.{own}" for name in names for own, _ in model.get_submodule(name).named_parameters()}


def _head_modules(model: nn.Module) -> set[nn.Module]:
    """The last layer: timm's networks tell it, of others it is the last linear one; a detector has more."""
    tell = getattr(model, "get_head", None) or getattr(model, "get_classifier", None)
    if tell is None:
        return set([module for module in model.modules() if isinstance(module, nn.Linear)][-1:])
    found = tell()
    modules = found if isinstance(found, tuple | list) else [found]
    return {module for module in modules if module is not None}
