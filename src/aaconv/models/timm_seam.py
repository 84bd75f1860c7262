"""What we use of timm that it keeps in modules with a leading underscore, and gives no public name.

decode_arch_def, resolve_bn_args, round_channels (timm.models._efficientnet_builder): without them the stages of MnasNet
would have to be spelled out block by block.
feature_take_indices (timm.models._features): how timm's own networks read the `indices` of forward_intermediates.
timm.models._registry._deprecated_models: the names that timm builds but does not list.
"""

from collections.abc import Callable
from typing import TypeVar

from timm.models import register_model
from timm.models._efficientnet_builder import decode_arch_def, resolve_bn_args, round_channels
from timm.models._features import feature_take_indices
from timm.models._registry import _deprecated_models

__all__ = ["decode_arch_def", "feature_take_indices", "register_unlisted", "resolve_bn_args", "round_channels"]

EntryPoint = TypeVar("EntryPoint", bound=Callable)


def register_unlisted(entry_point: EntryPoint) -> EntryPoint:
    """timm's register_model for what is not a classifier: timm builds it, but does not list it among those that are."""
    _deprecated_models[entry_point.__name__] = None
    register_model(entry_point)
    return entry_point
