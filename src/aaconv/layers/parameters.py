"""The parameters of attention, or of what stands in its place, by name, and those of them that weight decay would harm:
as timm's optimizers ask for them, model.no_weight_decay()."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .aaconv import AAConvNd
from .comparisons import Comparison

BRANCHED = (AAConvNd, Comparison)
"""Layers with a branch beside their convolution."""


def no_weight_decay(model: nn.Module) -> set[str]:
    """The names of what the AAConv layers of a model leave out of weight decay; augment(combine="add") provides it.

    For a network that is written with AAConv2d(combine="add"):

        def no_weight_decay(self):
            return aaconv.layers.no_weight_decay(self)
    """
    return {f"{name}.{own}".removeprefix(".") for name, layer in _branched(model) for own in layer.no_weight_decay()}


def attention_parameters(model: nn.Module) -> set[str]:
    """The names of what the AAConv layers of a model have besides their convolutions, comparisons alike."""
    found = ((name, own) for name, layer in _branched(model) for own, _ in layer.named_parameters())
    return {f"{name}.{own}".removeprefix(".") for name, own in found if not own.startswith("conv.")}


def _branched(model: nn.Module) -> Iterator[tuple[str, AAConvNd | Comparison]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BRANCHED))


@dataclass(frozen=True)
class Excluded:
    """What stands in a model's `no_weight_decay`: a call gives the names. Copies and pickles of the model keep it."""

    names: frozenset[str]

    def __call__(self) -> set[str]:
        return set(self.names)


def exclude_from_weight_decay(model: nn.Module) -> None:
    """Let the model name its layers' parameters, beside those that it names already."""
    own: set[str] = getattr(model, "no_weight_decay", set)()
    if (names := no_weight_decay(model)) and not isinstance(model, BRANCHED):
        model.__dict__["no_weight_decay"] = Excluded(frozenset(names | set(own)))
