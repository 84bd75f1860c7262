"""What the torch backends share: heads in and out of the packed projection, and the relative logits."""

import torch
from torch import Tensor


def split_heads(qkv: Tensor, num_heads: int, key_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, height, width, 2*dk + dv] -> q, k, v, each [batch, num_heads, height, width, depth]; views, no copies."""
    value_channels = qkv.shape[-1] - 2 * key_channels
    q, k, v = qkv.split([key_channels, key_channels, value_channels], dim=-1)
    q, k, v = (part.unflatten(-1, (num_heads, -1)).permute(0, 3, 1, 2, 4) for part in (q, k, v))
    return q, k, v


def join_heads(out: Tensor, height: int, width: int) -> Tensor:
    """[batch, num_heads, height * width, depth] -> [batch, height, width, num_heads * depth]."""
    return out.transpose(1, 2).flatten(2).unflatten(1, (height, width))


def relative_logits(q: Tensor, rel_h: Tensor, rel_w: Tensor) -> tuple[Tensor, Tensor]:
    """What a query gives to each key row and to each key column, by their distance alone.

    q [batch, num_heads, height, width, depth] -> [batch, num_heads, height, width, height] and [..., width].
    """
    height, width = q.shape[2:4]
    by_row = _absolute(rel_h.to(q.dtype), height)
    by_column = _absolute(rel_w.to(q.dtype), width)
    return relative_logits_by(q, by_row, 2), relative_logits_by(q, by_column, 3)


def relative_logits_by(q: Tensor, vectors: Tensor, dim: int) -> Tensor:
    """q [batch, num_heads, height, width, depth], and for each query along its dimension `dim` a vector for each of the
    lines [[num_heads,] from i, to j, depth] -> [batch, num_heads, height, width, lines]."""
    of_heads = "" if vectors.dim() == 3 else "n"
    return torch.einsum(f"bnyxd,{of_heads}{'yx'[dim - 2]}jd->bnyxj", q, vectors)


def relative_logits_gradients(q: Tensor, table: Tensor, grad: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of what relative_logits gives along dimension `dim` (2: rows, 3: columns), from grad [batch, num_heads, height,
    width, lines]: the gradients of q, alike, and of the table, in float32."""
    side, heads = q.shape[dim], "" if table.dim() == 2 else "n"
    line = "yx"[dim - 2]
    grad_q = torch.einsum(f"bnyxj,{heads}{line}jd->bnyxd", grad, _absolute(table.to(q.dtype), side))
    # [..., from i, to j, depth], then the sum over all i and j of a distance: with i backwards and rows of twice the
    # length, rows one shorter have a distance in each column. So additions have one order, and no index.
    pairs = torch.einsum(f"bnyxj,bnyxd->{heads}{line}jd", grad, q).float().flip(-3)
    skewed = torch.cat([pairs, torch.zeros_like(pairs)], dim=-2).flatten(-3, -2)
    by_distance = skewed[..., : side * (2 * side - 1), :].unflatten(-2, (side, 2 * side - 1))
    return grad_q, by_distance.sum(-3)


def _absolute(table: Tensor, length: int) -> Tensor:
    """Relative table [..., 2*length - 1, depth] -> [..., length (from i), length (to j), depth] = table[j - i]."""
    position = torch.arange(length, device=table.device)
    offset = position[None, :] - position[:, None] + (length - 1)
    return table[..., offset, :]
