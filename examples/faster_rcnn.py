"""torchvision's Faster R-CNN on the features of an attention augmented ResNet.

python examples/faster_rcnn.py --backbone aa_resnet50 --size 640
"""

import argparse
from collections import OrderedDict

import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

import aaconv  # noqa: F401  registers its models with timm


class Features(nn.Module):
    """Four maps of a timm network, from a quarter of the image on, and a pyramid of 256 channels over them."""

    out_channels = 256

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.body = timm.create_model(name, features_only=True, out_indices=(1, 2, 3, 4), img_size=size)
        channels = self.body.feature_info.channels()
        self.fpn = FeaturePyramidNetwork(channels, self.out_channels, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(level), x) for level, x in enumerate(self.body(images))))


def faster_rcnn(name: str, num_classes: int, size: int) -> FasterRCNN:
    """num_classes counts the background, as torchvision does."""
    anchors = AnchorGenerator(tuple((side,) for side in (32, 64, 128, 256, 512)), ((0.5, 1.0, 2.0),) * 5)
    pool = MultiScaleRoIAlign(["0", "1", "2", "3"], output_size=7, sampling_ratio=2)
    sizes = {"min_size": size, "max_size": size}
    return FasterRCNN(Features(name, size), num_classes, rpn_anchor_generator=anchors, box_roi_pool=pool, **sizes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backbone", default="aa_resnet50")
    parser.add_argument("--size", type=int, default=320)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model = faster_rcnn(chosen.backbone, num_classes=3, size=chosen.size)
    images = [torch.rand(3, chosen.size, chosen.size), torch.rand(3, chosen.size, chosen.size * 3 // 4)]
    targets = [{"boxes": torch.tensor([[8.0, 8.0, 56.0, 40.0]]), "labels": torch.tensor([1])} for _ in images]
    losses = model.train()(images, targets)
    sum(losses.values()).backward()
    print(", ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items()))
    with torch.no_grad():
        found = model.eval()(images)
    print(f"{len(found[0]['boxes'])} and {len(found[1]['boxes'])} boxes before any training")
