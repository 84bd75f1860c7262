"""ResNets for ImageNet: plain, gated and attention augmented (tables 2, 3 and 6 of the paper).

"Deep Residual Learning for Image Recognition", He et al. 2015, arXiv:1512.03385; the stride is in the 3x3, and the
first block of every stage has a projection shortcut, ResNet-18 and 34 too.
"""

import re
from functools import partial
from typing import Any

from timm.models import resnet
from torch import nn

from ..layers.gates import GATES
from .family import (
    ATTENTION_OPTIONS,
    KINDS,
    augment_network,
    entry_point,
    gate_options,
    image_size,
    imagenet_cfgs,
    keyword_names,
    sort_options,
)

__all__ = ["ResNet"]


class ResNet(resnet.ResNet):
    """timm's ResNet with a projection in the first stage, a gate by name, and attention beside the 3x3s.

    block, layers: "basic" or "bottleneck", and how many of them in each of the four stages.
    gate: "se", "ge", "bam", "cbam", "gala" or None; its keywords (reduction, ...) are options.
    augmented: swap the first 3x3 of every block of the last three stages; AAConv2d's keywords are options.
    img_size: what the relative tables are made for; any other size runs as well.
    options: the gate's, the attention's, and those of timm's ResNet.
    """

    def __init__(
        self,
        block: str,
        layers: tuple[int, ...],
        *,
        gate: str | None = None,
        augmented: bool = False,
        img_size: int | tuple[int, int] = 224,
        **options: Any,
    ):
        gated, attention, rest = sort_options(
            options,
            gate_options(gate),
            ATTENTION_OPTIONS if augmented else set(),
            keyword_names(resnet.ResNet.__init__) - {"block", "layers"},
            owner=type(self).__name__,
            also=["img_size"],
        )
        img_size = image_size(img_size)
        gate_class = GATES.get(gate)
        if gate_class and gate_class.after == "block":
            rest["block_args"] = {"attn_layer": partial(gate_class, **gated), **(rest.get("block_args") or {})}
        super().__init__(_BLOCKS[block], layers, **rest)
        factory = {"device": self.conv1.weight.device, "dtype": self.conv1.weight.dtype}
        if self.layer1[0].downsample is None:
            self.layer1[0].downsample = _projection(self.layer1[0], **factory)
        if gate_class and gate_class.after == "stage":
            for stage, info in zip((self.layer1, self.layer2, self.layer3), self.feature_info[1:], strict=False):
                stage.append(gate_class(info["num_chs"], **gated, **factory))
        if augmented:
            self._augment(block, img_size, attention)

    def _augment(self, block: str, img_size: tuple[int, int], attention: dict[str, Any]) -> None:
        conv = "conv1" if block == "basic" else "conv2"
        augment_network(
            self,
            self.in_chans,
            img_size,
            attention,
            where=re.compile(rf"layer[234]\.\d+\.{conv}"),
            downsample=lambda name, conv, size: name.startswith("layer2."),
        )


_BLOCKS = {"basic": resnet.BasicBlock, "bottleneck": resnet.Bottleneck}


def _projection(block: resnet.BasicBlock, **factory: Any) -> nn.Sequential:
    channels = block.conv2.out_channels
    conv = nn.Conv2d(block.conv1.in_channels, channels, 1, bias=False, **factory)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, type(block.bn2)(channels, **factory))


_DEPTHS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}


def _settings(kind: str, block: str, layers: tuple[int, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {"block": block, "layers": layers}
    if kind == "aa":
        key_ratio, value_ratio = (0.25, 0.25) if block == "basic" else (0.2, 0.1)
        return settings | {"augmented": True, "key_ratio": key_ratio, "value_ratio": value_ratio}
    return settings if kind == "plain" else settings | {"gate": kind}


_VARIANTS = {
    f"{kind}_resnet{depth}": (_settings(kind, *shape), f"ResNet-{depth}, {title}.")
    for kind, title in KINDS.items()
    for depth, shape in _DEPTHS.items()
}

default_cfgs = imagenet_cfgs(_VARIANTS, interpolation="bilinear", first_conv="conv1", classifier="fc")

for _name, (_chosen, _doc) in _VARIANTS.items():
    globals()[_name] = entry_point(__name__, ResNet, _name, _chosen, _doc)
