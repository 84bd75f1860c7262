"""RetinaNet for object detection, on any backbone (tables 5 and 8 of the paper).

"Focal Loss for Dense Object Detection", Lin et al. 2017, arXiv:1708.02002, as the code the authors used builds it: a
batch norm on every level of the pyramid, and heads that share their convolutions but not their batch norms.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

from ..detection import AnchorSettings, Detections, PostprocessSettings, make_anchors, postprocess
from ..layers import dry_run
from ..utils.errors import one_line
from .family import create, image_size
from .timm_seam import register_unlisted

__all__ = ["RetinaNet", "retinanet"]

PRIOR = 0.01
"""The score of every anchor and class at the start: nearly all of them are background."""


class Head(nn.Module):
    """3x3s shared by the levels, each with a batch norm a level, and a last 3x3 that predicts `outputs` an anchor."""

    def __init__(self, channels: int, anchors: int, outputs: int, *, depth: int, levels: int) -> None:
        super().__init__()
        self.anchors, self.outputs = anchors, outputs
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(levels)) for _ in range(depth))
        self.predict = nn.Conv2d(channels, anchors * outputs, 3, padding=1)
        for conv in (*self.convs, self.predict):
            nn.init.normal_(conv.weight, std=0.01)
            nn.init.zeros_(conv.bias)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Levels [batch, channels, height, width] -> [batch, anchors of all levels, outputs]."""
        return torch.cat([self._predict(x, level) for level, x in enumerate(maps)], dim=1)

    def _predict(self, x: Tensor, level: int) -> Tensor:
        for conv, norms in zip(self.convs, self.norms, strict=True):
            x = F.relu(norms[level](conv(x)), inplace=True)  # type: ignore[index]
        return self.predict(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, self.outputs)


class Pyramid(nn.Module):
    """Three maps of a backbone -> five of `channels`, each half as large as the one before, with a batch norm each."""

    def __init__(self, in_channels: list[int], channels: int) -> None:
        super().__init__()
        self.fpn = FeaturePyramidNetwork(in_channels, channels, extra_blocks=LastLevelP6P7(channels, channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(len(in_channels) + 2))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = self.fpn({str(i): x for i, x in enumerate(maps)})
        return [norm(x) for norm, x in zip(self.norms, levels.values(), strict=True)]


class RetinaNet(nn.Module):
    """A detector. Of a batch [B, in_chans, H, W] it gives what the heads say about every anchor: logits [B, anchors,
    num_classes] and box codes [B, anchors, 4]; of a list of images of any sizes, the `Detections` of each.

    backbone: a name that timm knows, built with `options`, or a module with timm's feature_info whose forward gives
        several maps; the last three, each half as large as the one before, feed the pyramid.
    img_size: for a backbone whose tables depend on it; any other size runs as well.
    anchor_scale, anchor_scales, anchor_ratios: `AnchorSettings`; 2 scales x 3 ratios is the paper's count, 3 x 3 usual.
    pretrained_backbone: start from timm's weights of the backbone.
    """

    def __init__(
        self,
        backbone: str | nn.Module,
        *,
        num_classes: int = 90,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        channels: int = 256,
        head_depth: int = 4,
        anchor_scale: float = 4.0,
        anchor_scales: int = 2,
        anchor_ratios: Sequence[float] = (0.5, 1.0, 2.0),
        pretrained_backbone: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, got {num_classes=}")
        self.num_classes, self.in_chans, self.grad_checkpointing = num_classes, in_chans, False
        self.anchor_settings = AnchorSettings(anchor_scale, anchor_scales, tuple(anchor_ratios))
        if isinstance(backbone, str):
            if img_size is not None:
                options["img_size"] = image_size(img_size)
            backbone = timm.create_model(
                backbone, pretrained_backbone, features_only=True, in_chans=in_chans, **options
            )
        elif options or pretrained_backbone:
            raise TypeError(f"a backbone that is built already takes no options, got {', '.join(options) or 'weights'}")
        self.backbone = backbone
        self.taken, in_channels, strides = _last_three(backbone)
        self.channels_come_last = getattr(backbone, "output_fmt", "NCHW") == "NHWC"  # Swin's do
        self.strides = (*strides, 2 * strides[-1], 4 * strides[-1])
        self.pyramid = Pyramid(in_channels, channels)
        anchors = self.anchor_settings.per_position
        make_head = partial(Head, channels, anchors, depth=head_depth, levels=len(self.strides))
        self.class_head = make_head(num_classes)
        self.box_head = make_head(4)
        _start_at_prior(self.class_head.predict)
        self._anchors: dict[tuple, list[Tensor]] = {}

    def forward(self, images: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor] | list[Detections]:
        if isinstance(images, Tensor):
            return self.forward_head(self.forward_features(images))
        return self.detect(images)

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """[B, in_chans, H, W] -> five maps [B, channels, H / stride, W / stride]."""
        maps = checkpoint(self.backbone, x, use_reentrant=False) if self.grad_checkpointing else self.backbone(x)
        taken = [maps[i] for i in self.taken]
        return self.pyramid([x.permute(0, 3, 1, 2) for x in taken] if self.channels_come_last else taken)

    def forward_head(self, maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.class_head(maps), self.box_head(maps)

    def anchors(self, size: tuple[int, int], device: torch.device | str | None = None) -> list[Tensor]:
        """Per level [anchors, 4], in the order of the outputs, for canvases of `size`; made once."""
        size, device = (size[0], size[1]), torch.device(device or next(self.parameters()).device)
        if any(side % self.multiple or side < 1 for side in size):
            raise ValueError(f"the size must be a multiple of {self.multiple}, got {size[0]} x {size[1]}")
        if (size, device) not in self._anchors:
            self._anchors[size, device] = make_anchors(size, self.strides, self.anchor_settings, device)
        return self._anchors[size, device]

    @property
    def multiple(self) -> int:
        """What height and width of a canvas must be multiples of: the stride of the backbone's last map."""
        return self.strides[2]

    def check_maps(self, size: int) -> None:
        """A ValueError unless the backbone gives a pixel per stride of a canvas of `size`, which anchors are made for;
        some have convolutions without padding. Computes nothing but shapes."""
        twin, _ = dry_run.copy_without_memory(self.backbone)
        try:
            maps = dry_run.run(twin, torch.empty(1, self.in_chans, size, size, device="meta"))
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error):
                return  # it reads values, which only a real run has
            raise ValueError(
                f"the backbone does not run at size {size}: {one_line(error)}; name another size or backbone"
            ) from None
        for i, stride in zip(self.taken, self.strides, strict=False):
            height, width = maps[i].shape[1:3] if self.channels_come_last else maps[i].shape[2:]
            if (height, width) != (size // stride, size // stride):
                raise ValueError(
                    f"the maps of the backbone do not fit the anchors: at size {size} and stride {stride} one is "
                    f"{height} x {width} instead of {size // stride} x {size // stride}; name another backbone"
                )

    @torch.no_grad()
    def detect(self, images: Sequence[Tensor], settings: PostprocessSettings | None = None) -> list[Detections]:
        """What is in the images, normalised [in_chans, height, width] each, of any sizes, in their pixels.

        A FloatingPointError where a score is not finite: none would be above a threshold, as if nothing were there.
        """
        if len(images) == 0:
            return []
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        height, width = (_round_up(max(sides), self.multiple) for sides in zip(*sizes, strict=True))
        canvas = images[0].new_zeros(len(images), self.in_chans, height, width)
        for place, image in zip(canvas, images, strict=True):
            place[:, : image.shape[-2], : image.shape[-1]] = image
        logits, codes = self(canvas)
        if not logits.isfinite().all():
            raise FloatingPointError("a score of the network is not finite")
        return postprocess(logits, codes, self.anchors((height, width), canvas.device), sizes, settings)

    def get_classifier(self) -> nn.Module:
        return self.class_head.predict

    def get_head(self) -> list[nn.Module]:
        """All but the backbone: what is new where the backbone starts from weights."""
        return [self.pyramid, self.class_head, self.box_head]

    def reset_classifier(self, num_classes: int) -> None:
        """Another number of classes: only the last layer of the class head is new."""
        old = self.class_head.predict
        self.num_classes = self.class_head.outputs = num_classes
        new = nn.Conv2d(old.in_channels, self.class_head.anchors * num_classes, 3, padding=1)
        nn.init.normal_(new.weight, std=0.01)
        _start_at_prior(new)
        self.class_head.predict = new.to(old.weight).train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the backbone again in the backward pass instead of keeping its maps."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """By stages, as timm's networks number them: layer1, blocks.1, stages_1; the head comes last."""
        return {"stem": r"^backbone\.(?:conv|bn|stem|patch_embed)", "blocks": r"^backbone\.[a-z_]+\.?(\d+)"}


def retinanet(backbone: str | nn.Module, **options: Any) -> RetinaNet:
    """`RetinaNet(backbone, ...)`: `retinanet("convnext_tiny", num_classes=20, pretrained_backbone=True)`."""
    return RetinaNet(backbone, **options)


def _start_at_prior(predict: nn.Conv2d) -> None:
    assert predict.bias is not None
    nn.init.constant_(predict.bias, math.log(PRIOR / (1 - PRIOR)))


def _last_three(backbone: nn.Module) -> tuple[list[int], list[int], list[int]]:
    """Which of the maps of a backbone feed the pyramid, their channels and their strides."""
    if not hasattr(backbone, "feature_info"):
        raise ValueError(
            f"the backbone {type(backbone).__name__} has no feature_info; build it with features_only=True"
        )
    info: Any = backbone.feature_info
    channels, strides = info.channels(), info.reduction()
    taken = [i for i, stride in enumerate(strides) if i + 1 == len(strides) or strides[i + 1] > stride][-3:]
    if len(taken) < 3 or any(2 * strides[a] != strides[b] for a, b in pairwise(taken)):
        raise ValueError(f"the backbone must give three maps, each half as large as the one before, got {strides=}")
    return taken, [channels[i] for i in taken], [strides[i] for i in taken]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _halvings(name: str, conv: nn.Conv2d, size: tuple[int, int]) -> int:
    """The first augmented stage attends at a quarter of its map, 20 of 80 at 640 pixels."""
    return 2 if name.startswith("layer2.") else 0


default_cfgs = generate_default_cfgs(
    {
        f"{kind}_retinanet_resnet{depth}": {
            "num_classes": 90,
            "input_size": (3, 640, 640),
            "pool_size": None,
            "interpolation": "bilinear",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "backbone.conv1",
            "classifier": "class_head.predict",
        }
        for kind in ("plain", "se", "aa")
        for depth in (18, 50, 101)
    }
)


def _augmented(conv: str) -> dict[str, Any]:
    """No block with a stride, which is the first of its stage."""
    where = re.compile(rf"layer[234]\.[1-9]\d*\.{conv}")
    return {"where": where, "downsample": _halvings, "min_key_channels_per_head": 0}


def _create(name: str, pretrained: bool, options: dict[str, Any], backbone: str, **settings: Any) -> RetinaNet:
    return create(RetinaNet, name, pretrained, options, {"backbone": backbone, "img_size": 640, **settings})


@register_unlisted
def plain_retinanet_resnet18(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-18, plain."""
    return _create("plain_retinanet_resnet18", pretrained, options, "plain_resnet18")


@register_unlisted
def plain_retinanet_resnet50(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-50, plain."""
    return _create("plain_retinanet_resnet50", pretrained, options, "plain_resnet50")


@register_unlisted
def plain_retinanet_resnet101(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-101, plain."""
    return _create("plain_retinanet_resnet101", pretrained, options, "plain_resnet101")


@register_unlisted
def se_retinanet_resnet18(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-18, with SE."""
    return _create("se_retinanet_resnet18", pretrained, options, "se_resnet18")


@register_unlisted
def se_retinanet_resnet50(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-50, with SE."""
    return _create("se_retinanet_resnet50", pretrained, options, "se_resnet50")


@register_unlisted
def se_retinanet_resnet101(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-101, with SE."""
    return _create("se_retinanet_resnet101", pretrained, options, "se_resnet101")


@register_unlisted
def aa_retinanet_resnet18(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-18, attention augmented."""
    return _create("aa_retinanet_resnet18", pretrained, options, "aa_resnet18", **_augmented("conv1"))


@register_unlisted
def aa_retinanet_resnet50(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-50, attention augmented."""
    return _create("aa_retinanet_resnet50", pretrained, options, "aa_resnet50", **_augmented("conv2"))


@register_unlisted
def aa_retinanet_resnet101(pretrained: bool = False, **options: Any) -> RetinaNet:
    """RetinaNet on ResNet-101, attention augmented."""
    return _create("aa_retinanet_resnet101", pretrained, options, "aa_resnet101", **_augmented("conv2"))
