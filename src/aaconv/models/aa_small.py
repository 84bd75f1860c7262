"""A convolutional network of a few layers, plain, with SE and attention augmented: what `aaconv demo` trains.

Its windows stay narrower than the gap between the two objects of `shapes` (16 columns hold them both at 32 pixels), so
that nothing but SE's average over the image, or attention, brings the two together before the end.
"""

import re
from itertools import accumulate
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, create_classifier
from timm.models import checkpoint_seq
from torch import Tensor, nn

from ..layers.gates import GATES
from .family import (
    ATTENTION_OPTIONS,
    KINDS,
    augment_network,
    entry_point,
    gate_options,
    image_size,
    small_image_cfgs,
    sort_options,
)

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


class SmallNet(nn.Module):
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
        super().__init__()
        if len(strides) < 2 or min(*strides, width) < 1:
            raise ValueError(f"there must be two strides or more, and a width of at least 1, got {strides=}, {width=}")
        own = {"strides", "width", "num_classes", "in_chans", "global_pool", "drop_rate", "drop_path_rate", "img_size"}
        names = gate_options(gate), ATTENTION_OPTIONS if augmented else set()
        gated, attention = sort_options(options, *names, owner=type(self).__name__, also=own)
        factory = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.num_features = self.head_hidden_size = width
        self.grad_checkpointing = False
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
        self.global_pool, self.fc = create_classifier(width, num_classes, pool_type=global_pool, **factory)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if augmented:
            where = re.compile(r"blocks\.[1-9]\d*\.conv")
            augment_network(self, in_chans, image_size(img_size), attention, where=where)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^blocks\.0", "blocks": r"^blocks\.(\d+)"}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        weight = self.blocks[0].norm.weight
        self.num_classes = num_classes
        like = {"device": weight.device, "dtype": weight.dtype}
        self.global_pool, self.fc = create_classifier(self.num_features, num_classes, pool_type=global_pool, **like)

    def forward_features(self, x: Tensor) -> Tensor:
        """[N, in_chans, H, W] -> [N, width, H / 4, W / 4] with the usual strides."""
        return checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.global_pool(x)
        x = F.dropout(x, self.drop_rate, self.training) if self.drop_rate else x
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "se": {"gate": "se"},
    # Parameters as near to the plain network's as whole channels a head allow.
    "aa": {
        "augmented": True,
        "num_heads": 4,
        "key_ratio": 0.75,
        "value_ratio": 0.25,
        "min_key_channels_per_head": 4,
    },
}
_VARIANTS = {f"{kind}_small": (chosen, f"Three 3x3 convolutions, {KINDS[kind]}.") for kind, chosen in _SETTINGS.items()}

default_cfgs = small_image_cfgs(
    _VARIANTS,
    num_classes=2,
    # of the images of shapes
    mean=(0.3, 0.3, 0.3),
    std=(0.12, 0.12, 0.12),
    first_conv="blocks.0.conv",
    classifier="fc",
)

for _name, (_chosen, _doc) in _VARIANTS.items():
    globals()[_name] = entry_point(__name__, SmallNet, _name, _chosen, _doc, {"flatten_sequential": True})
