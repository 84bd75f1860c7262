"""Bilinear resizing of feature maps."""

import torch
import torch.nn.functional as F
from torch import Tensor


def resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """F.interpolate(x, size, mode="bilinear"): [batch, channels, h, w] -> [batch, channels, *size].

    Where a gradient is wanted it is two products instead. The gradient of torch's is scattered by atomic additions,
    which are slow, most of all compiled, and add up in another order every time. Not in an exported network: there the
    products' shapes would bind a width that was declared free.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or torch.compiler.is_exporting():
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    batch, channels, height, width = x.shape
    rows = _weights(height, size[0], x) @ x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
    result = _weights(width, size[1], x) @ rows.reshape(batch * size[0], width, channels)
    return result.reshape(batch, *size, channels).permute(0, 3, 1, 2)


def _weights(old: int, new: int, like: Tensor) -> Tensor:
    """[new, old]: what each new place takes of the old ones."""
    one_hot = torch.eye(old, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    return F.interpolate(one_hot[None], size=new, mode="linear", align_corners=False)[0].mT.to(like.dtype)
