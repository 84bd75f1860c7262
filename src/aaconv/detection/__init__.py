"""What a detector needs beside its network: anchors, the loss, and boxes out of what the network says."""

from .anchors import AnchorSettings, make_anchors
from .loss import DetectionLoss, match
from .postprocess import Detections, PostprocessSettings, postprocess

__all__ = [
    "AnchorSettings",
    "DetectionLoss",
    "Detections",
    "PostprocessSettings",
    "make_anchors",
    "match",
    "postprocess",
]
