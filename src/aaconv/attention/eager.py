"""The paper's equation as it stands, the reference every other backend is held against.

It keeps the whole (HW) x (HW) map of every head, so its memory grows with the square of the number of pixels.
"""

import torch
from torch import Tensor

from .heads import join_heads, relative_logits, relative_logits_by, split_heads
from .windows import Window


def why_not(
    qkv: Tensor, rel_h: Tensor | None, rel_w: Tensor | None, *, num_heads: int, key_channels: int
) -> str | None:
    """The reference runs on everything torch runs on."""
    return None


def attention_logits(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    window: Window | None = None,
) -> Tensor:
    """The equation before the softmax, for pixels i = (y, x) and j = (v, u); -inf where i does not see j.

    [batch, height, width, 2*dk + dv] -> [batch, num_heads, height (y), width (x), height (v), width (u)]
    """
    q, k, _ = split_heads(qkv, num_heads, key_channels)
    q = q * q.shape[-1] ** -0.5
    logits = _finite(torch.einsum("bnyxd,bnvud->bnyxvu", q, k))
    if window is None:
        if rel_h is not None and rel_w is not None:
            height_logits, width_logits = (_finite(part) for part in relative_logits(q, rel_h, rel_w))
            logits = _finite(logits + height_logits[..., :, None] + width_logits[..., None, :])
        return logits
    height, width = q.shape[2:4]
    (rows_seen, row), (columns_seen, column) = (
        axis.sees(length, q.device) for axis, length in ((window.rows, height), (window.columns, width))
    )
    if rel_h is not None and rel_w is not None:
        height_logits = _finite(relative_logits_by(q, rel_h.to(q.dtype)[..., row, :], 2))
        width_logits = _finite(relative_logits_by(q, rel_w.to(q.dtype)[..., column, :], 3))
        logits = _finite(logits + height_logits[..., :, None] + width_logits[..., None, :])
    seen = rows_seen[:, None, :, None] & columns_seen[None, :, None, :]
    return logits.masked_fill(~seen, float("-inf"))


def _finite(logits: Tensor) -> Tensor:
    """In float16 a product above 65504 is infinite, and the softmax of two such ones is not a number."""
    if logits.dtype != torch.float16:
        return logits
    largest = torch.finfo(torch.float16).max
    return logits.clamp(-largest, largest)


def attention_maps(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    window: Window | None = None,
) -> Tensor:
    """The weight pixel i gives to pixel j: [batch, num_heads, height * width (i), height * width (j)]."""
    logits = attention_logits(qkv, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels, window=window)
    return logits.flatten(4).softmax(-1).flatten(2, 3)


def attend(
    qkv: Tensor,
    rel_h: Tensor | None,
    rel_w: Tensor | None,
    *,
    num_heads: int,
    key_channels: int,
    window: Window | None = None,
) -> Tensor:
    """[batch, height, width, 2*dk + dv] -> [batch, height, width, dv]."""
    maps = attention_maps(qkv, rel_h, rel_w, num_heads=num_heads, key_channels=key_channels, window=window)
    _, _, v = split_heads(qkv, num_heads, key_channels)
    # Autocast computes the softmax in float32; the product goes on in the dtype of the values.
    out = maps.to(v.dtype) @ v.flatten(2, 3)
    return join_heads(out, *qkv.shape[1:3])


def attend_decomposed(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, scale: float) -> Tensor:
    """The logit of a query for the key at (y, x) of the map is scale * q . k + rows[y] + columns[x]; keys before those
    of the map have no bias."""
    logits = (q * scale) @ k.transpose(-1, -2)
    bias = (rows[..., :, None] + columns[..., None, :]).flatten(3).to(logits.dtype)
    leading = k.shape[2] - bias.shape[3]
    logits = torch.cat([logits[..., :leading], logits[..., leading:] + bias], dim=-1) if leading else logits + bias
    return logits.softmax(-1).to(v.dtype) @ v
