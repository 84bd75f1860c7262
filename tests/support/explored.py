"""A small network with sharp attention at two resolutions, for the tests of the explorer."""

import numpy as np
import torch
from torch import nn

from aaconv import AAConv2d
from aaconv.runs.load import TrainedModel

NAME, LAYERS = "small_network", ("first", "second", "coarse")


class SmallNetwork(nn.Module):
    """16 x 16 maps of 32 x 32 images, the last layer attends at 8 x 8; one layer has a pair of tables a head."""

    def __init__(self):
        super().__init__()
        attention = {"num_heads": 4, "key_channels": 16, "value_channels": 8}
        self.first = AAConv2d(3, 16, 3, stride=2, size=16, share_heads=False, **attention)
        self.second = AAConv2d(16, 16, 3, size=16, **attention)
        self.coarse = AAConv2d(16, 16, 3, size=8, downsample=True, **attention)
        self.classify = nn.Linear(16, 2)
        for layer in (self.first, self.second, self.coarse):
            nn.init.normal_(layer.qkv.weight, std=0.4)

    def forward(self, x):
        x = self.coarse(self.second(self.first(x).relu()).relu())
        return self.classify(x.mean((2, 3)))


def small_network():
    torch.manual_seed(0)
    return TrainedModel(
        model=SmallNetwork().eval(),
        recipe=None,
        classes=("different colours", "same colour"),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        size=32,
        task="classify",
        source=NAME,
        metrics=None,
    )


def maps_of(packed, layer):
    """What the page computes for all positions: [heads, cells of the queries' map, cells of the keys' map]."""
    factors = packed.unpack(layer.grid)
    return np.stack([factors.row(*cell) for cell in np.ndindex(layer.height, layer.width)], axis=1)
