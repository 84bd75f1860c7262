"""Wide-ResNets for CIFAR by name: plain, gated and attention augmented (table 1 of the paper)."""

from typing import Any

from timm.models import register_model

from .family import KINDS, create, small_image_cfgs
from .wide_resnet import WideResNet

__all__ = ["WideResNet"]

default_cfgs = small_image_cfgs(
    [f"{kind}_wrn{shape}" for kind in KINDS for shape in ("28_10", "28_2", "16_4", "40_2")],
    num_classes=100,
    # of the CIFAR-100 training images
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    first_conv="conv1",
    classifier="fc",
)

_AUGMENTED = {"augmented": True, "key_ratio": 0.2, "value_ratio": 0.1}
# 0.1 would leave the eight heads of a narrow first stage without a value channel.
_AUGMENTED_NARROW = {"augmented": True, "key_ratio": 0.2, "value_ratio": 0.125, "min_value_channels_per_head": 1}


def _create(
    name: str, pretrained: bool, options: dict[str, Any], depth: int, width: int, **settings: Any
) -> WideResNet:
    features = {"feature_cls": "getter", "out_indices": (0, 1, 2, 3)}
    return create(WideResNet, name, pretrained, options, {"depth": depth, "width": width, **settings}, features)


@register_model
def plain_wrn28_10(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-10, plain."""
    return _create("plain_wrn28_10", pretrained, options, 28, 10)


@register_model
def plain_wrn28_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-2, plain."""
    return _create("plain_wrn28_2", pretrained, options, 28, 2)


@register_model
def plain_wrn16_4(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-16-4, plain."""
    return _create("plain_wrn16_4", pretrained, options, 16, 4)


@register_model
def plain_wrn40_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-40-2, plain."""
    return _create("plain_wrn40_2", pretrained, options, 40, 2)


@register_model
def se_wrn28_10(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-10, with SE."""
    return _create("se_wrn28_10", pretrained, options, 28, 10, gate="se")


@register_model
def se_wrn28_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-2, with SE."""
    return _create("se_wrn28_2", pretrained, options, 28, 2, gate="se")


@register_model
def se_wrn16_4(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-16-4, with SE."""
    return _create("se_wrn16_4", pretrained, options, 16, 4, gate="se")


@register_model
def se_wrn40_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-40-2, with SE."""
    return _create("se_wrn40_2", pretrained, options, 40, 2, gate="se")


@register_model
def ge_wrn28_10(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-10, with GE."""
    return _create("ge_wrn28_10", pretrained, options, 28, 10, gate="ge")


@register_model
def ge_wrn28_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-2, with GE."""
    return _create("ge_wrn28_2", pretrained, options, 28, 2, gate="ge")


@register_model
def ge_wrn16_4(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-16-4, with GE."""
    return _create("ge_wrn16_4", pretrained, options, 16, 4, gate="ge")


@register_model
def ge_wrn40_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-40-2, with GE."""
    return _create("ge_wrn40_2", pretrained, options, 40, 2, gate="ge")


@register_model
def bam_wrn28_10(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-10, with BAM."""
    return _create("bam_wrn28_10", pretrained, options, 28, 10, gate="bam")


@register_model
def bam_wrn28_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-2, with BAM."""
    return _create("bam_wrn28_2", pretrained, options, 28, 2, gate="bam")


@register_model
def bam_wrn16_4(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-16-4, with BAM."""
    return _create("bam_wrn16_4", pretrained, options, 16, 4, gate="bam")


@register_model
def bam_wrn40_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-40-2, with BAM."""
    return _create("bam_wrn40_2", pretrained, options, 40, 2, gate="bam")


@register_model
def cbam_wrn28_10(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-10, with CBAM."""
    return _create("cbam_wrn28_10", pretrained, options, 28, 10, gate="cbam")


@register_model
def cbam_wrn28_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-2, with CBAM."""
    return _create("cbam_wrn28_2", pretrained, options, 28, 2, gate="cbam")


@register_model
def cbam_wrn16_4(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-16-4, with CBAM."""
    return _create("cbam_wrn16_4", pretrained, options, 16, 4, gate="cbam")


@register_model
def cbam_wrn40_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-40-2, with CBAM."""
    return _create("cbam_wrn40_2", pretrained, options, 40, 2, gate="cbam")


@register_model
def gala_wrn28_10(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-10, with GALA."""
    return _create("gala_wrn28_10", pretrained, options, 28, 10, gate="gala")


@register_model
def gala_wrn28_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-2, with GALA."""
    return _create("gala_wrn28_2", pretrained, options, 28, 2, gate="gala")


@register_model
def gala_wrn16_4(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-16-4, with GALA."""
    return _create("gala_wrn16_4", pretrained, options, 16, 4, gate="gala")


@register_model
def gala_wrn40_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-40-2, with GALA."""
    return _create("gala_wrn40_2", pretrained, options, 40, 2, gate="gala")


@register_model
def aa_wrn28_10(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-10, attention augmented."""
    return _create("aa_wrn28_10", pretrained, options, 28, 10, **_AUGMENTED)


@register_model
def aa_wrn28_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-28-2, attention augmented."""
    return _create("aa_wrn28_2", pretrained, options, 28, 2, **_AUGMENTED_NARROW)


@register_model
def aa_wrn16_4(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-16-4, attention augmented."""
    return _create("aa_wrn16_4", pretrained, options, 16, 4, **_AUGMENTED_NARROW)


@register_model
def aa_wrn40_2(pretrained: bool = False, **options: Any) -> WideResNet:
    """Wide-ResNet-40-2, attention augmented."""
    return _create("aa_wrn40_2", pretrained, options, 40, 2, **_AUGMENTED_NARROW)
