"""The attention mechanisms the paper compares with: gates that rescale a map and keep its shape.

One class a paper, one signature: `Gate(channels, ..., device=None, dtype=None)`, [batch, channels, height, width] ->
the same shape. `after` says where a network puts them: "block" on the residual branch of every block, "stage" behind
every stage but the last.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pooling import average
from .tracing import leaf

__all__ = ["BAM", "CBAM", "GALA", "GATES", "GE", "SE"]


def _hidden(channels: int, reduction: int) -> int:
    if channels < 1 or reduction < 1:
        raise ValueError(f"channels and reduction must be at least 1, got {channels=}, {reduction=}")
    return max(1, channels // reduction)


def _bottleneck(
    channels: int, hidden: int, bias: bool, out_channels: int | None = None, **factory: Any
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 1, bias=bias, **factory),
        nn.ReLU(inplace=True),
        nn.Conv2d(hidden, out_channels or channels, 1, bias=bias, **factory),
    )


def _mean_pool(x: Tensor) -> Tensor:
    return x.mean((2, 3), keepdim=True)


class SE(nn.Module):
    """Squeeze-and-Excitation (Hu et al. 2018, arXiv:1709.01507): x * sigmoid(MLP(mean of x))."""

    after = "block"

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        bias: bool = False,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.mlp = _bottleneck(channels, _hidden(channels, reduction), bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mlp(_mean_pool(x)).sigmoid()


class GE(nn.Module):
    """Gather-Excite (Hu et al. 2018, arXiv:1810.12348): x * sigmoid(what is gathered around each pixel).

    extent: how many pixels a gathered one stands for, a power of two; None gathers the whole map.
    learned=False (its paper's theta-minus) averages. learned=True (theta) gathers by depthwise convolutions, each with
    a batch norm: log2(extent) of 3x3 and stride 2, or one as large as the whole map, whose `size` it must then know.
    """

    after = "block"

    def __init__(
        self,
        channels: int,
        learned: bool = False,
        extent: int | None = None,
        size: int | tuple[int, int] | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if extent is not None and (extent < 2 or extent & (extent - 1)):
            raise ValueError(f"extent must be a power of two of at least 2, or None for the whole map, got {extent=}")
        if learned and extent is None and size is None:
            raise ValueError(
                "a learned gather of the whole map must know its size: give size=(height, width) or extent="
            )
        self.extent = extent
        self.gather = None
        if learned and extent is not None:
            steps = extent.bit_length() - 1
            halve = {"stride": 2, "padding": 1, **factory}
            self.gather = nn.Sequential(*(_depthwise(channels, 3, **halve) for _ in range(steps)))
        elif learned and size is not None:
            self.gather = _depthwise(channels, size, stride=1, padding=0, **factory)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        if self.gather is not None:
            gathered = self.gather(x)
        elif self.extent is None:
            gathered = _mean_pool(x)
        else:
            e = self.extent
            gathered = average(x, (2 * e - 1, 2 * e - 1), (e, e))
        if gathered.shape[-2:] != (1, 1):
            gathered = F.interpolate(gathered, x.shape[-2:], mode="nearest")
        return x * gathered.sigmoid()


def _depthwise(
    channels: int, kernel_size: int | tuple[int, int], *, stride: int, padding: int, **factory: Any
) -> nn.Sequential:
    conv = nn.Conv2d(channels, channels, kernel_size, stride, padding, groups=channels, bias=False, **factory)
    return nn.Sequential(conv, nn.BatchNorm2d(channels, **factory))


class BAM(nn.Module):
    """Bottleneck Attention Module (Park et al. 2018, arXiv:1807.06514): x * (1 + sigmoid(channel + spatial))."""

    after = "stage"

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        dilation: int = 4,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = _hidden(channels, reduction)

        def conv_norm_act(in_channels: int, kernel_size: int, padding: int = 0) -> list[nn.Module]:
            conv = nn.Conv2d(in_channels, hidden, kernel_size, padding=padding, dilation=max(1, padding), **factory)
            return [conv, nn.BatchNorm2d(hidden, **factory), nn.ReLU(inplace=True)]

        # Linear layers and a 1-d batch norm: the pooled map is [batch, channels].
        self.channel = nn.Sequential(
            nn.Linear(channels, hidden, **factory),
            nn.BatchNorm1d(hidden, **factory),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, channels, **factory),
        )
        self.spatial = nn.Sequential(
            *conv_norm_act(channels, 1),
            *conv_norm_act(hidden, 3, dilation),
            *conv_norm_act(hidden, 3, dilation),
            nn.Conv2d(hidden, 1, 1, **factory),
        )

    def forward(self, x: Tensor) -> Tensor:
        channel = self.channel(x.mean((2, 3)))[:, :, None, None]
        return x * (1 + (channel + self.spatial(x)).sigmoid())


class CBAM(nn.Module):
    """Convolutional Block Attention Module (Woo et al. 2018, arXiv:1807.06521): a channel gate, then a spatial one."""

    after = "block"

    def __init__(
        self,
        channels: int,
        reduction: int = 16,
        kernel_size: int = 7,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd to keep the shape, got {kernel_size=}; try {kernel_size + 1}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mlp = _bottleneck(channels, _hidden(channels, reduction), bias=True, **factory)
        self.spatial = nn.Sequential(
            nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False, **factory), nn.BatchNorm2d(1, **factory)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * (self.mlp(_mean_pool(x)) + self.mlp(x.amax((2, 3), keepdim=True))).sigmoid()
        pooled = torch.cat([x.amax(1, keepdim=True), x.mean(1, keepdim=True)], dim=1)
        return x * self.spatial(pooled).sigmoid()


class GALA(nn.Module):
    """Global-and-local attention (Linsley et al. 2019, arXiv:1805.08819): x * (a (g + l) + m g l).

    g [batch, channels, 1, 1] is the global gate of SE, l [batch, 1, height, width] a saliency map; a and m weigh their
    sum and their product, one pair a channel. It starts as the mean of the two gates.
    """

    after = "block"

    def __init__(self, channels: int, reduction: int = 16, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = _hidden(channels, reduction)
        self.channel = _bottleneck(channels, hidden, bias=False, **factory)
        self.saliency = _bottleneck(channels, hidden, bias=False, out_channels=1, **factory)
        self.sum_weight = nn.Parameter(torch.full((channels, 1, 1), 0.5, **factory))
        self.product_weight = nn.Parameter(torch.zeros(channels, 1, 1, **factory))

    def forward(self, x: Tensor) -> Tensor:
        channel = self.channel(_mean_pool(x)).sigmoid()
        saliency = self.saliency(x).sigmoid()
        # In the dtype of the map: under autocast the parameters would make it float32 again.
        a, m = self.sum_weight.to(x.dtype), self.product_weight.to(x.dtype)
        return x * (a * (channel + saliency) + m * channel * saliency)


GATES: dict[str, type[SE | GE | BAM | CBAM | GALA]] = {"se": SE, "ge": GE, "bam": BAM, "cbam": CBAM, "gala": GALA}
