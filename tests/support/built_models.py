"""Models without memory, and what is in them."""

import timm
import torch

from aaconv.layers.aaconv import AAConv2d


def on_meta(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def augmented(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, AAConv2d)}
