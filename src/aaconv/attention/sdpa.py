"""The same equation through one call of torch's fused scaled_dot_product_attention: exact, on every device.

A query is extended by its relative logits, one for each row and one for each column of the map; a key is extended by
the one-hot of its row and of its column. Their inner product is q.k plus exactly the two relative logits, so the fused
kernel needs no bias and nothing of size (HW) x (HW) is ever stored, forward or backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .heads import join_heads, relative_logits, split_heads


def why_not(
    qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int
) -> str | None:
    """The call itself accepts whatever torch does; only a dtype without a fused kernel is refused."""
    if qkv.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return f"sdpa computes in float16, bfloat16, float32 or float64, got {qkv.dtype}"
    if qkv.dtype == torch.float64 and qkv.is_cuda:
        return "no fused float64 kernel on CUDA, it would store the maps; use backend='eager' or float32"
    return None


def attend(qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv]."""
    height, width = qkv.shape[1:3]
    q, k, v = split_heads(qkv, num_heads, key_channels)
    value_depth = v.shape[-1]
    q = q * q.shape[-1] ** -0.5
    if rel_h is not None and rel_w is not None:
        q = torch.cat([q, *(part.to(q.dtype) for part in relative_logits(q, rel_h, rel_w))], dim=-1)
        k = torch.cat([k, _rows_and_columns(height, width, k).expand(*k.shape[:2], -1, -1, -1)], dim=-1)
    q, k, v = (part.flatten(2, 3) for part in (q, k, v))
    # The fused kernels want one depth for q, k and v (CPU), a multiple of 8 (CUDA): zeros change no product.
    depth = max(q.shape[-1], value_depth)
    if qkv.is_cuda:
        depth += -depth % 8
    q, k, v = (_widen(part, depth) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, scale=1.0)[..., :value_depth]
    return join_heads(out, height, width)


def _widen(part: Tensor, depth: int) -> Tensor:
    """Zeros up to the depth. By cat: the backward of F.pad gives a compiled graph strides it does not expect."""
    if part.shape[-1] == depth:
        return part
    return torch.cat([part, part.new_zeros(*part.shape[:-1], depth - part.shape[-1])], dim=-1)


def _rows_and_columns(height: int, width: int, like: Tensor) -> Tensor:
    """One-hot of the row beside one-hot of the column of every pixel: [height, width, height + width]."""
    rows = torch.eye(height, dtype=like.dtype, device=like.device)[:, None, :].expand(height, width, height)
    columns = torch.eye(width, dtype=like.dtype, device=like.device)[None, :, :].expand(height, width, width)
    return torch.cat([rows, columns], dim=-1)
