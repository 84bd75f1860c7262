"""Networks whose numbers are not those of a start, where zeros and ones hide mistakes."""

import torch
from torch import nn


def randomize(model: nn.Module) -> nn.Module:
    """Random batch norm statistics, scales and biases, of a size that keeps the signal alive."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(std=0.1)
    return model
