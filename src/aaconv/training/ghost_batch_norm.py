"""Batch norm over parts of a batch: what several GPUs without synchronisation do, on one.

"Train longer, generalize better", Hoffer et al. 2017, arXiv:1705.08741.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class GhostBatchNorm2d(nn.BatchNorm2d):
    """In training every `images` images that follow each other are normalised by their own mean and variance.

    The running statistics take one step per batch, towards the mean of the parts'. Keys, and evaluation, are those of
    nn.BatchNorm2d.
    """

    images: int

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or len(input) <= self.images:
            return super().forward(input)
        parts = input.split(self.images)
        running: Any = self.running_mean, self.running_var, self.num_batches_tracked
        means, variances = (one.repeat(len(parts), 1) for one in running[:2])
        how = self.weight, self.bias, True, self.momentum or 0.0, self.eps
        outputs = [
            F.batch_norm(part, mean, variance, *how)
            for part, mean, variance in zip(parts, means, variances, strict=True)
        ]
        for total, new in zip(running, (means.mean(0), variances.mean(0), running[2] + 1), strict=True):
            total.copy_(new)
        return torch.cat(outputs)


def use_ghost_batch_norm(model: nn.Module, images: int) -> nn.Module:
    """The network with its batch norms over `images` images each; a ValueError where one is of another class."""
    for name, module in model.named_modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GhostBatchNorm2d
            module.images = images  # type: ignore[assignment]
        elif isinstance(module, _BatchNorm):
            raise ValueError(f"ghost_batch is for nn.BatchNorm2d, {name} is a {type(module).__name__}; leave it out")
    return model
