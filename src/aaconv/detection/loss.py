"""The loss of a detector, of a whole batch at once: no loop over images, no shape that depends on values.

"Focal Loss for Dense Object Detection", Lin et al. 2017, arXiv:1708.02002. Anchors are matched by torchvision's law
(its Matcher takes one image at a time), and classes weighed by its function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_iou, sigmoid_focal_loss

from .boxes import encode

BACKGROUND, IGNORED = -1, -2


def match(anchors: Tensor, boxes: Tensor, present: Tensor, foreground: float = 0.5, background: float = 0.4) -> Tensor:
    """For each anchor the object it is for, BACKGROUND, or IGNORED: int64 [batch, anchors].

    anchors [anchors, 4], boxes [batch, objects, 4], present bool [batch, objects]. An anchor is for the object that it
    overlaps with most, if by `foreground` at least; the anchors nearest to an object are for one however little they
    overlap.
    """
    batch, objects = present.shape
    overlap = box_iou(boxes.reshape(-1, 4), anchors).view(batch, objects, -1)
    overlap = torch.where(present[..., None], overlap, -1.0)
    best, nearest = overlap.max(dim=1)
    matches = torch.where(best < foreground, IGNORED, nearest)
    matches = torch.where(best < background, BACKGROUND, matches)
    highest = overlap.amax(dim=2, keepdim=True)
    # Not ==: a compiler may compute the overlap twice, and differently in the last bit.
    needed = ((overlap >= highest * (1 - 1e-6)) & (highest > 0)).any(dim=1)
    return torch.where(needed, nearest, matches)


class DetectionLoss(nn.Module):
    """Focal loss of the classes plus smooth L1 of the coded boxes, both over the number of anchors with an object.

    The defaults are those of the code the paper's authors used: its Huber loss with delta 0.1, times 50, over four
    numbers a box, is 1.25 times a smooth L1.
    """

    def __init__(
        self, alpha: float = 0.25, gamma: float = 2.0, box_weight: float = 1.25, box_beta: float = 0.1
    ) -> None:
        super().__init__()
        self.alpha, self.gamma, self.box_weight, self.box_beta = alpha, gamma, box_weight, box_beta

    def forward(
        self, logits: Tensor, deltas: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(class loss, box loss) of logits [batch, anchors, classes] and deltas [batch, anchors, 4]; `Targets` has the
        rest. The sum of the two is what training lowers."""
        class_loss, box_loss, number = self.sums(logits, deltas, anchors, boxes, labels)
        return class_loss / number.clamp(min=1), box_loss / number.clamp(min=1)

    def sums(
        self, logits: Tensor, deltas: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both losses summed over the batch, and the number of anchors with an object: what adds up over batches."""
        logits, deltas = logits.float(), deltas.float()
        matches = match(anchors, boxes, labels >= 0)
        found = matches >= 0
        index = matches.clamp(min=0)

        wanted = torch.where(found, labels.gather(1, index), BACKGROUND)
        one_hot = (wanted[..., None] == torch.arange(logits.shape[-1], device=logits.device)).to(logits.dtype)
        focal = sigmoid_focal_loss(logits, one_hot, self.alpha, self.gamma)
        class_loss = torch.where((matches != IGNORED)[..., None], focal, 0.0).sum()

        # An anchor without an object is its own target: no logarithm of a box that is not there.
        every = anchors.expand(len(boxes), -1, -1)
        wanted_boxes = torch.where(found[..., None], boxes.gather(1, index[..., None].expand(-1, -1, 4)), every)
        apart = F.smooth_l1_loss(deltas, encode(wanted_boxes, every), beta=self.box_beta, reduction="none")
        box_loss = torch.where(found[..., None], apart, 0.0).sum()
        return class_loss, self.box_weight * box_loss, found.sum()
