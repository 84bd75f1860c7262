"""The modules: AAConv1d and AAConv2d, the gates that the paper compares with, and what puts them into a network."""

from .aaconv import AAConv1d, AAConv2d, AAConvNd
from .accelerate import accelerate
from .augment import augment
from .channels import attention_channels
from .fold import fold_batch_norm
from .parameters import attention_parameters, no_weight_decay

__all__ = [
    "AAConv1d",
    "AAConv2d",
    "AAConvNd",
    "accelerate",
    "attention_channels",
    "attention_parameters",
    "augment",
    "fold_batch_norm",
    "no_weight_decay",
]
