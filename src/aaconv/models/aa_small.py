"""A convolutional network of a few layers, plain, with SE and attention augmented: what `aaconv demo` trains.

Its windows stay narrower than the gap between the two objects of `shapes` (16 columns hold them both at 32 pixels), so
that nothing but SE's average over the image, or attention, brings the two together before the end.
"""

import re
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from timm.layers import DropPath
from timm.models import checkpoint_seq, register_model
from torch import Tensor, nn

from ..layers.gates import GATES
from .classifier import Classifier
from .family import ATTENTION_OPTIONS, augment_network, create, gate_options, image_size, small_image_cfgs, sort_options

__all__ = ["SmallNet"]


class Block(nn.Module):
    """3x3, batch norm, ReLU and a gate; a shortcut around them where the shape stays."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, *, gate: nn.Module | None, drop_path: float, **factory: Any
    ):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False, **factory)
        self.norm = nn.BatchNorm2d(channels, **factory)
        self.act = nn.ReLU(inplace=True)
        self.gate = gate or nn.Identity()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.residual = in_channels == channels and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(self.act(self.norm(self.conv(x))))
        return x + self.drop_path(y) if self.residual else y


class SmallNet(Classifier):
    """A 3x3 convolution of `width` channels for each of `strides`; those of 2, 2, 1 see windows of 3, 7, 15 pixels.

    gate: "se", "ge", "cbam", "gala" or None; its keywords (reduction, ...) are options.
    augmented: swap all convolutions but the first; AAConv2d's keywords are options.
    img_size: what the relative tables are made for; any other size runs as well.
    """

    def __init__(
        self,
        strides: tuple[int, ...] = (2, 2, 1),
        width: int = 32,
        *,
        num_classes: int = 2,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        gate: str | None = None,
        augmented: bool = False,
        img_size: int | tuple[int, int] = 32,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(num_classes=num_classes, in_chans=in_chans, drop_rate=drop_rate)
        if len(strides) < 2 or min(*strides, width) < 1:
            raise ValueError(f"there must be two strides or more, and a width of at least 1, got {strides=}, {width=}")
        own = {"strides", "width", "num_classes", "in_chans", "global_pool", "drop_rate", "drop_path_rate", "img_size"}
        names = gate_options(gate), ATTENTION_OPTIONS if augmented else set()
        gated, attention = sort_options(options, *names, owner=type(self).__name__, also=own)
        factory = {"device": device, "dtype": dtype}
        rates = torch.linspace(0, drop_path_rate, len(strides), device="cpu").tolist()
        self.blocks = nn.Sequential(
            *(
                Block(
                    width if index else in_chans,
                    width,
                    stride,
                    gate=GATES[gate](width, **gated, **factory) if gate else None,
                    drop_path=rate,
                    **factory,
                )
                for index, (stride, rate) in enumerate(zip(strides, rates, strict=True))
            )
        )
        reductions = accumulate(strides, mul)
        self.feature_info = [
            {"num_chs": width, "reduction": reduction, "module": f"blocks.{index}"}
            for index, reduction in enumerate(reductions)
        ]
        self.add_head(width, global_pool, **factory)
        if augmented:
            where = re.compile(r"blocks\.[1-9]\d*\.conv")
            augment_network(self, in_chans, image_size(img_size), attention, where=where)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^blocks\.0", "blocks": r"^blocks\.(\d+)"}

    def forward_features(self, x: Tensor) -> Tensor:
        """[N, in_chans, H, W] -> [N, width, H / 4, W / 4] with the usual strides."""
        return checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)


default_cfgs = small_image_cfgs(
    ["plain_small", "se_small", "aa_small"],
    num_classes=2,
    # of the images of shapes
    mean=(0.3, 0.3, 0.3),
    std=(0.12, 0.12, 0.12),
    first_conv="blocks.0.conv",
    classifier="fc",
)


def _create(name: str, pretrained: bool, options: dict[str, Any], **settings: Any) -> SmallNet:
    features = {"flatten_sequential": True, "out_indices": (0, 1, 2)}
    return create(SmallNet, name, pretrained, options, settings, features)


@register_model
def plain_small(pretrained: bool = False, **options: Any) -> SmallNet:
    """Three 3x3 convolutions, plain."""
    return _create("plain_small", pretrained, options)


@register_model
def se_small(pretrained: bool = False, **options: Any) -> SmallNet:
    """Three 3x3 convolutions, with SE."""
    return _create("se_small", pretrained, options, gate="se")


@register_model
def aa_small(pretrained: bool = False, **options: Any) -> SmallNet:
    """Three 3x3 convolutions, attention augmented."""
    # Parameters as near to the plain network's as whole channels per head allow.
    attention = {"num_heads": 4, "key_ratio": 0.75, "value_ratio": 0.25, "min_key_channels_per_head": 4}
    return _create("aa_small", pretrained, options, augmented=True, **attention)
