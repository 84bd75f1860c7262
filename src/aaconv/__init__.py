"""Attention augmented convolutions for PyTorch: convolutional networks that also attend."""

from . import models, recipes
from .attention import attend_2d, default_backend, set_default_backend
from .layers.aaconv import AAConv1d, AAConv2d, attention_channels
from .layers.augment import augment
from .version import __version__

__all__ = [
    "AAConv1d",
    "AAConv2d",
    "__version__",
    "attend_2d",
    "attention_channels",
    "augment",
    "default_backend",
    "models",
    "recipes",
    "set_default_backend",
]
