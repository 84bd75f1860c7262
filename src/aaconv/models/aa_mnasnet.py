"""MnasNet-A1 at four widths, plain and attention augmented (table 4 of the paper).

"MnasNet: Platform-Aware Neural Architecture Search for Mobile", Tan et al. 2019, arXiv:1807.11626. timm builds the
network (it calls it semnasnet).
"""

import re
from functools import partial
from typing import Any

from timm.models import efficientnet, register_model
from torch import nn

from .family import (
    ATTENTION_OPTIONS,
    augment_network,
    create,
    image_size,
    imagenet_cfgs,
    keyword_names,
    sort_options,
)
from .timm_seam import decode_arch_def, resolve_bn_args, round_channels

__all__ = ["MnasNet"]

# Blocks 1 | 2, 3 | 4-6 | 7-10 | 11, 12 | 13-15 | 16; the first of a stage carries its stride.
_STAGES = [
    ["ds_r1_k3_s1_e1_c16_noskip"],
    ["ir_r2_k3_s2_e6_c24"],
    ["ir_r3_k5_s2_e3_c40_se0.25"],
    ["ir_r4_k3_s2_e6_c80"],
    ["ir_r2_k3_s1_e6_c112_se0.25"],
    ["ir_r3_k5_s2_e6_c160_se0.25"],
    ["ir_r1_k3_s1_e6_c320"],
]


class MnasNet(efficientnet.EfficientNet):
    """MnasNet-A1 with all channels times `width`.

    augmented: swap the 1x1 expansions of blocks 4 to 16; AAConv2d's keywords are options.
    img_size: what the relative tables are made for; any other size runs as well.
    options: the attention's, bn_momentum and bn_eps, and those of timm's EfficientNet.
    """

    def __init__(
        self,
        width: float = 1.0,
        *,
        augmented: bool = False,
        img_size: int | tuple[int, int] = 224,
        **options: Any,
    ):
        attention, rest, norm = sort_options(
            options,
            ATTENTION_OPTIONS if augmented else set(),
            keyword_names(efficientnet.EfficientNet.__init__) - {"block_args", "round_chs_fn"},
            {"bn_momentum", "bn_eps"},
            owner=type(self).__name__,
            also=["img_size"],
        )
        img_size = image_size(img_size)
        rest.setdefault("norm_layer", partial(nn.BatchNorm2d, **resolve_bn_args(norm)))
        super().__init__(decode_arch_def(_STAGES), round_chs_fn=partial(round_channels, multiplier=width), **rest)
        if augmented:
            where = re.compile(r"blocks\.[2-6]\.\d+\.conv_pw")
            augment_network(self, self.in_chans, img_size, attention, where=where, downsample=_halvings)


def _halvings(name: str, conv: nn.Conv2d, size: tuple[int, int]) -> int:
    """The first augmented stage attends at half its output, 14 of 28; its first expansion still sees 56."""
    if name.startswith("blocks.2.0."):
        return 2
    return 1 if name.startswith("blocks.2.") else 0


default_cfgs = imagenet_cfgs(
    [f"{kind}_mnasnet_{width}" for kind in ("plain", "aa") for width in ("075", "100", "125", "140")],
    interpolation="bicubic",
    first_conv="conv_stem",
    classifier="classifier",
)

_AUGMENTED = {
    "augmented": True,
    "num_heads": 4,
    "key_ratio": 0.1,
    "value_ratio": 0.05,
    "min_key_channels_per_head": 1,
    "min_value_channels_per_head": 1,
    "attention_bias": True,
}


def _create(name: str, pretrained: bool, options: dict[str, Any], width: float, **settings: Any) -> MnasNet:
    return create(MnasNet, name, pretrained, options, {"width": width, **settings}, {"feature_cls": "getter"})


@register_model
def plain_mnasnet_075(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 0.75, plain."""
    return _create("plain_mnasnet_075", pretrained, options, 0.75)


@register_model
def plain_mnasnet_100(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 1.0, plain."""
    return _create("plain_mnasnet_100", pretrained, options, 1.0)


@register_model
def plain_mnasnet_125(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 1.25, plain."""
    return _create("plain_mnasnet_125", pretrained, options, 1.25)


@register_model
def plain_mnasnet_140(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 1.4, plain."""
    return _create("plain_mnasnet_140", pretrained, options, 1.4)


@register_model
def aa_mnasnet_075(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 0.75, attention augmented."""
    return _create("aa_mnasnet_075", pretrained, options, 0.75, **_AUGMENTED)


@register_model
def aa_mnasnet_100(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 1.0, attention augmented."""
    return _create("aa_mnasnet_100", pretrained, options, 1.0, **_AUGMENTED)


@register_model
def aa_mnasnet_125(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 1.25, attention augmented."""
    return _create("aa_mnasnet_125", pretrained, options, 1.25, **_AUGMENTED)


@register_model
def aa_mnasnet_140(pretrained: bool = False, **options: Any) -> MnasNet:
    """MnasNet-A1 x 1.4, attention augmented."""
    return _create("aa_mnasnet_140", pretrained, options, 1.4, **_AUGMENTED)
