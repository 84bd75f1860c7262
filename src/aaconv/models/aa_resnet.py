"""ResNets for ImageNet: plain, gated and attention augmented (tables 2, 3 and 6 of the paper).

"Deep Residual Learning for Image Recognition", He et al. 2015, arXiv:1512.03385; the stride is in the 3x3, and the
first block of every stage has a projection shortcut, ResNet-18 and 34 too.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from timm.models import register_model, resnet
from torch import nn

from ..layers.gates import GATES
from ..utils.numbers import is_whole
from .family import (
    ATTENTION_OPTIONS,
    KINDS,
    augment_network,
    create,
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
    stem_pool: halve the map behind the first convolution, as for 224 pixels; without it images of 64 have maps of 32,
        16, 8 and 4, which are attended over as they are.
    num_heads: as in `augment`, or one for each stage: [2, 4, 8, 8].
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
        stem_pool: bool = True,
        **options: Any,
    ):
        heads = options.get("num_heads")
        if augmented and isinstance(heads, list | tuple):
            options["num_heads"] = _by_stage(heads, len(layers))
        gated, attention, rest = sort_options(
            options,
            gate_options(gate),
            ATTENTION_OPTIONS if augmented else set(),
            keyword_names(resnet.ResNet.__init__) - {"block", "layers"},
            owner=type(self).__name__,
            also=["img_size", "stem_pool"],
        )
        img_size = image_size(img_size)
        gate_class = None if gate is None else GATES[gate]
        if gate_class and gate_class.after == "block":
            rest["block_args"] = {"attn_layer": partial(gate_class, **gated), **(rest.get("block_args") or {})}
        super().__init__(_BLOCKS[block], layers, **rest)  # type: ignore[arg-type]
        if not stem_pool:
            self._leave_out_pooling()
        factory: dict[str, Any] = {"device": self.conv1.weight.device, "dtype": self.conv1.weight.dtype}
        first: Any = self.get_submodule("layer1.0")
        if first.downsample is None:
            first.downsample = _projection(first, **factory)
        if gate_class and gate_class.after == "stage":
            stages: Any = self.layer1, self.layer2, self.layer3
            for stage, info in zip(stages, self.feature_info[1:], strict=False):
                stage.append(gate_class(info["num_chs"], **gated, **factory))  # type: ignore[arg-type]
        if augmented:
            self._augment(block, img_size, attention, downsample=stem_pool)

    def _leave_out_pooling(self) -> None:
        maps: list[dict[str, Any]] = self.feature_info
        self.maxpool = nn.Sequential()
        self.feature_info = [maps[0], *(info | {"reduction": info["reduction"] // 2} for info in maps[1:])]

    def _augment(self, block: str, img_size: tuple[int, int], attention: dict[str, Any], *, downsample: bool) -> None:
        conv = "conv1" if block == "basic" else "conv2"
        augment_network(
            self,
            self.in_chans,
            img_size,
            attention,
            where=re.compile(rf"layer[234]\.\d+\.{conv}"),
            downsample=lambda name, conv, size: downsample and name.startswith("layer2."),
        )


def _by_stage(heads: Sequence[int], stages: int) -> Callable[..., int | None]:
    """The heads of each stage as a rule of augment's; layers before the first stage have the default."""
    if len(heads) != stages or not all(is_whole(number) and number > 0 for number in heads):
        raise ValueError(
            f"num_heads must be an int, at least 1, or one for each of the {stages} stages, such as [2, 4, 8, 8], "
            f"or a mapping such as {{'layer1.*': 2}}, got num_heads={heads!r}"
        )

    def heads_of(name: str, *_: Any) -> int | None:
        stage = re.match(r"layer(\d+)\.", name)
        return heads[int(stage[1]) - 1] if stage else None

    return heads_of


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

default_cfgs = imagenet_cfgs(
    [*(f"{kind}_resnet{depth}" for kind in KINDS for depth in _DEPTHS), "aa_window_resnet50"],
    interpolation="bilinear",
    first_conv="conv1",
    classifier="fc",
)

_AUGMENTED_BASIC = {"augmented": True, "key_ratio": 0.25, "value_ratio": 0.25}
_AUGMENTED_BOTTLENECK = {"augmented": True, "key_ratio": 0.2, "value_ratio": 0.1}
# Eight heads of 20 key channels would be 160 beside the 64 channels of the first stage, whose map is the largest.
_IN_WINDOWS = {"window": 13, "where": "layer*.*.conv2", "downsample": 0, "num_heads": [2, 4, 8, 8]}


def _create(name: str, pretrained: bool, options: dict[str, Any], depth: int, **settings: Any) -> ResNet:
    block, layers = _DEPTHS[depth]
    return create(ResNet, name, pretrained, options, {"block": block, "layers": layers, **settings})


@register_model
def plain_resnet18(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-18, plain."""
    return _create("plain_resnet18", pretrained, options, 18)


@register_model
def plain_resnet34(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-34, plain."""
    return _create("plain_resnet34", pretrained, options, 34)


@register_model
def plain_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, plain."""
    return _create("plain_resnet50", pretrained, options, 50)


@register_model
def plain_resnet101(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-101, plain."""
    return _create("plain_resnet101", pretrained, options, 101)


@register_model
def plain_resnet152(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-152, plain."""
    return _create("plain_resnet152", pretrained, options, 152)


@register_model
def se_resnet18(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-18, with SE."""
    return _create("se_resnet18", pretrained, options, 18, gate="se")


@register_model
def se_resnet34(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-34, with SE."""
    return _create("se_resnet34", pretrained, options, 34, gate="se")


@register_model
def se_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, with SE."""
    return _create("se_resnet50", pretrained, options, 50, gate="se")


@register_model
def se_resnet101(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-101, with SE."""
    return _create("se_resnet101", pretrained, options, 101, gate="se")


@register_model
def se_resnet152(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-152, with SE."""
    return _create("se_resnet152", pretrained, options, 152, gate="se")


@register_model
def ge_resnet18(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-18, with GE."""
    return _create("ge_resnet18", pretrained, options, 18, gate="ge")


@register_model
def ge_resnet34(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-34, with GE."""
    return _create("ge_resnet34", pretrained, options, 34, gate="ge")


@register_model
def ge_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, with GE."""
    return _create("ge_resnet50", pretrained, options, 50, gate="ge")


@register_model
def ge_resnet101(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-101, with GE."""
    return _create("ge_resnet101", pretrained, options, 101, gate="ge")


@register_model
def ge_resnet152(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-152, with GE."""
    return _create("ge_resnet152", pretrained, options, 152, gate="ge")


@register_model
def bam_resnet18(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-18, with BAM."""
    return _create("bam_resnet18", pretrained, options, 18, gate="bam")


@register_model
def bam_resnet34(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-34, with BAM."""
    return _create("bam_resnet34", pretrained, options, 34, gate="bam")


@register_model
def bam_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, with BAM."""
    return _create("bam_resnet50", pretrained, options, 50, gate="bam")


@register_model
def bam_resnet101(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-101, with BAM."""
    return _create("bam_resnet101", pretrained, options, 101, gate="bam")


@register_model
def bam_resnet152(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-152, with BAM."""
    return _create("bam_resnet152", pretrained, options, 152, gate="bam")


@register_model
def cbam_resnet18(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-18, with CBAM."""
    return _create("cbam_resnet18", pretrained, options, 18, gate="cbam")


@register_model
def cbam_resnet34(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-34, with CBAM."""
    return _create("cbam_resnet34", pretrained, options, 34, gate="cbam")


@register_model
def cbam_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, with CBAM."""
    return _create("cbam_resnet50", pretrained, options, 50, gate="cbam")


@register_model
def cbam_resnet101(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-101, with CBAM."""
    return _create("cbam_resnet101", pretrained, options, 101, gate="cbam")


@register_model
def cbam_resnet152(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-152, with CBAM."""
    return _create("cbam_resnet152", pretrained, options, 152, gate="cbam")


@register_model
def gala_resnet18(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-18, with GALA."""
    return _create("gala_resnet18", pretrained, options, 18, gate="gala")


@register_model
def gala_resnet34(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-34, with GALA."""
    return _create("gala_resnet34", pretrained, options, 34, gate="gala")


@register_model
def gala_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, with GALA."""
    return _create("gala_resnet50", pretrained, options, 50, gate="gala")


@register_model
def gala_resnet101(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-101, with GALA."""
    return _create("gala_resnet101", pretrained, options, 101, gate="gala")


@register_model
def gala_resnet152(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-152, with GALA."""
    return _create("gala_resnet152", pretrained, options, 152, gate="gala")


@register_model
def aa_resnet18(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-18, attention augmented."""
    return _create("aa_resnet18", pretrained, options, 18, **_AUGMENTED_BASIC)


@register_model
def aa_resnet34(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-34, attention augmented."""
    return _create("aa_resnet34", pretrained, options, 34, **_AUGMENTED_BASIC)


@register_model
def aa_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, attention augmented."""
    return _create("aa_resnet50", pretrained, options, 50, **_AUGMENTED_BOTTLENECK)


@register_model
def aa_resnet101(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-101, attention augmented."""
    return _create("aa_resnet101", pretrained, options, 101, **_AUGMENTED_BOTTLENECK)


@register_model
def aa_resnet152(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-152, attention augmented."""
    return _create("aa_resnet152", pretrained, options, 152, **_AUGMENTED_BOTTLENECK)


@register_model
def aa_window_resnet50(pretrained: bool = False, **options: Any) -> ResNet:
    """ResNet-50, attention in windows of 13 x 13 beside the 3x3s of all four stages, on maps that are not halved, in 2,
    4, 8 and 8 heads."""
    return _create("aa_window_resnet50", pretrained, options, 50, **_AUGMENTED_BOTTLENECK, **_IN_WINDOWS)
