"""attend_2d for heads of many channels, through the decomposed kernels.

Heads of 20 channels leave room in a matrix product, which triton_pack fills; heads of 64 fill it themselves. Relative
logits are computed first, [pixels, height] and [pixels, width] a head, and again in the backward: nothing but inputs,
output and log-sum-exp is kept.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from . import triton_decomposed as decomposed
from .triton_plan import SCRATCH, SMALL_SCRATCH, ceil_div


def forward(
    qkv: Tensor,
    rel_h: Tensor,
    rel_w: Tensor,
    height: int,
    num_heads: int,
    key_channels: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fills out [batch, pixels, dv] and lse [batch * heads, 2, pixels]."""
    scale = (key_channels // num_heads) ** -0.5
    if decomposed.is_aligned(*_heads(qkv, num_heads, key_channels), _split(out, num_heads)):
        _forward(qkv, rel_h, rel_w, height, num_heads, key_channels, scale, out, lse)
        return
    of_heads = Padded(num_heads, key_channels, out.shape[2])
    into = of_heads.pad_values(out)
    tables = decomposed.pad_depth(rel_h), decomposed.pad_depth(rel_w)
    _forward(of_heads.pad(qkv), *tables, height, num_heads, of_heads.padded_keys, scale, into, lse)
    out.copy_(of_heads.cut_values(into))


def _forward(
    qkv: Tensor,
    rel_h: Tensor,
    rel_w: Tensor,
    height: int,
    num_heads: int,
    key_channels: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    width = qkv.shape[1] // height
    for images in _chunks(qkv, height, num_heads):
        q, k, v = _heads(qkv[images], num_heads, key_channels)
        relative = _relative(q, rel_h, height, width)
        rows, columns = relative.logits(q, rel_h, rel_w, scale)
        into = _split(out[images], num_heads), lse.unflatten(0, (-1, num_heads))[images].flatten(0, 1)
        decomposed.forward(q, k, v, rows, columns, height, width, scale, into)


def backward(
    grad_out: Tensor,
    qkv: Tensor,
    rel_h: Tensor,
    rel_w: Tensor,
    out: Tensor,
    lse: Tensor,
    height: int,
    num_heads: int,
    key_channels: int,
    grad_qkv: Tensor,
    grad_tables: Tensor,
) -> None:
    """Fills grad_qkv and grad_tables [..., 2*height - 1 + 2*width - 1, depth] in float32."""
    scale = (key_channels // num_heads) ** -0.5
    if decomposed.is_aligned(*_heads(qkv, num_heads, key_channels), _split(grad_out, num_heads)):
        tensors = grad_out, qkv, rel_h, rel_w, out, lse
        _backward(*tensors, height, num_heads, key_channels, scale, grad_qkv, grad_tables)
        return
    of_heads = Padded(num_heads, key_channels, out.shape[2])
    padded_qkv, tables = of_heads.pad(qkv), (decomposed.pad_depth(rel_h), decomposed.pad_depth(rel_w))
    into = torch.empty_like(padded_qkv), decomposed.pad_depth(grad_tables)
    tensors = of_heads.pad_values(grad_out), padded_qkv, *tables, of_heads.pad_values(out), lse
    _backward(*tensors, height, num_heads, of_heads.padded_keys, scale, *into)
    grad_qkv.copy_(of_heads.cut(into[0]))
    grad_tables.copy_(into[1][..., : grad_tables.shape[-1]])


def _backward(
    grad_out: Tensor,
    qkv: Tensor,
    rel_h: Tensor,
    rel_w: Tensor,
    out: Tensor,
    lse: Tensor,
    height: int,
    num_heads: int,
    key_channels: int,
    scale: float,
    grad_qkv: Tensor,
    grad_tables: Tensor,
) -> None:
    width = qkv.shape[1] // height
    parts = []
    for images in _chunks(qkv, height, num_heads):
        q, k, v = _heads(qkv[images], num_heads, key_channels)
        relative = _relative(q, rel_h, height, width)
        rows, columns = relative.logits(q, rel_h, rel_w, scale)
        grads = _heads(grad_qkv[images], num_heads, key_channels)
        here = _split(grad_out[images], num_heads), q, k, v, rows, columns, _split(out[images], num_heads)
        log_sums = lse.unflatten(0, (-1, num_heads))[images].flatten(0, 1)
        grad_rows, grad_columns = decomposed.backward(*here, log_sums, height, width, scale, grads)
        del rows, columns
        parts.append(relative.gradients(q, rel_h, rel_w, grad_rows, grad_columns, grads[0], scale))
    first = rel_h.shape[-2]
    for place, of_chunks in zip((slice(None, first), slice(first, None)), zip(*parts, strict=True), strict=True):
        grad_tables[..., place, :] = of_chunks[0] if len(parts) == 1 else torch.stack(of_chunks).sum(0)


class Padded:
    """Packed projections and outputs, copied so that every head has a depth and an address the kernels can take."""

    def __init__(self, num_heads: int, key_channels: int, value_channels: int) -> None:
        self.num_heads, self.key_channels, self.value_channels = num_heads, key_channels, value_channels
        step = num_heads * decomposed.DEPTH_STEP
        self.padded_keys = ceil_div(key_channels, step) * step

    def pad(self, qkv: Tensor) -> Tensor:
        parts = qkv.split([self.key_channels, self.key_channels, self.value_channels], dim=2)
        return torch.cat([self.pad_values(part) for part in parts], dim=2)

    def pad_values(self, values: Tensor) -> Tensor:
        return decomposed.pad_depth(values.unflatten(2, (self.num_heads, -1))).flatten(2)

    def cut(self, padded: Tensor) -> Tensor:
        """The other way."""
        values = padded.shape[2] - 2 * self.padded_keys
        q, k, v = padded.split([self.padded_keys, self.padded_keys, values], dim=2)
        return torch.cat([self._cut(q, self.key_channels), self._cut(k, self.key_channels), self.cut_values(v)], dim=2)

    def cut_values(self, padded: Tensor) -> Tensor:
        return self._cut(padded, self.value_channels)

    def _cut(self, part: Tensor, channels: int) -> Tensor:
        return part.unflatten(2, (self.num_heads, -1))[..., : channels // self.num_heads].flatten(2)


def _chunks(qkv: Tensor, height: int, num_heads: int) -> Iterator[slice]:
    """Images whose relative logits fit into the scratch together: it stays linear in the input."""
    batch, pixels, _ = qkv.shape
    of_an_image = 2 * num_heads * pixels * (height + pixels // height)  # and their gradients
    room = max(SCRATCH * qkv.numel(), SMALL_SCRATCH / qkv.itemsize)
    step = max(1, int(room // of_an_image))
    for first in range(0, batch, step):
        yield slice(first, min(first + step, batch))


def _relative(q: Tensor, rel_h: Tensor, height: int, width: int) -> decomposed.Relative:
    device = q.device.index if q.is_cuda else None
    return decomposed.plan_relative(tuple(q.shape), height, width, rel_h.dim() == 3, q.dtype, rel_h.dtype, device)


def _heads(packed: Tensor, num_heads: int, key_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [batch, heads, pixels, depth] of the packed projection, views."""
    values = packed.shape[2] - 2 * key_channels
    q, k, v = packed.split([key_channels, key_channels, values], dim=2)
    return _split(q, num_heads), _split(k, num_heads), _split(v, num_heads)


def _split(part: Tensor, num_heads: int) -> Tensor:
    return part.unflatten(2, (num_heads, -1)).transpose(1, 2)
