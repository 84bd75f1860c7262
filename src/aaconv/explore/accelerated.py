"""The attention of accelerated modules as a page takes it: where queries and keys lie, factors, and exact weights.

SAM's encoder cuts its map into windows and attends in each as if it were an image of its own; here they are blocks of
one map. All tensors are of one image.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from torch import Tensor, nn

from ..attention.heads import split_heads
from ..layers.accelerated import Accelerated
from ..layers.families_2d import OneMap, Packed
from ..layers.families_decomposed import Halo, MultiScale
from .grid import Grid


def accelerated(module: nn.Module) -> Accelerated | None:
    """What aaconv.accelerate has put in the place of the module's forward."""
    there = vars(module).get("forward")
    return there if isinstance(there, Accelerated) else None


def grid(attention: Accelerated, name: str, *inputs: Any) -> Grid:
    """Of the module of that name, for what it is called with."""
    if isinstance(attention, OneMap):
        return _windows(attention, inputs[0], name)
    if isinstance(attention, Halo):
        return _halo(attention, inputs[0], name)
    assert isinstance(attention, MultiScale)
    return _pooled(attention, *inputs)


def parts(attention: Accelerated, *inputs: Any) -> dict[str, Tensor]:
    """Factors.parts, in float64."""
    if isinstance(attention, OneMap):
        qkv, rel_h, rel_w = attention.attention_inputs(*inputs)
        q, k, _ = split_heads(qkv.double(), attention.num_heads, attention.key_channels)
        q, k = (part.flatten(2, 3).transpose(0, 1).flatten(1, 2) for part in (q, k))
        return {"q": q * attention.depth**-0.5, "k": k, "rel_h": rel_h.double()[None], "rel_w": rel_w.double()[None]}
    q, k, rows, columns = (part.double().flatten(1, 2) for part in _decomposed(attention, *inputs))
    return {"q": q * attention.module.scale, "k": k, "rows": rows, "columns": columns}


def exact_weights(attention: Accelerated, *inputs: Any) -> Tensor:
    """By the formula as it stands: [blocks, heads, queries of a block, its keys]."""
    if isinstance(attention, OneMap):
        return attention.attention_maps(*inputs)
    q, k, rows, columns = _decomposed(attention, *inputs)
    logits = attention.module.scale * q @ k.transpose(-1, -2)
    bias = (rows[..., :, None] + columns[..., None, :]).flatten(-2)
    logits[..., logits.shape[-1] - bias.shape[-1] :] += bias
    return logits.softmax(-1).transpose(0, 1)


def _decomposed(attention: Accelerated, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, rows and columns, [heads, blocks, queries or keys of one, ...]; not the class token's own query."""
    if isinstance(attention, Halo):
        q, k, _, rows, columns = attention.attention_inputs(*inputs)
        return q, k, rows, columns
    assert isinstance(attention, MultiScale)
    (q, k, _, rows, columns), _, _ = attention.attention_inputs(*inputs)
    token = int(attention.module.has_cls_token)
    q, rows, columns = (part[0, :, None, token:] for part in (q, rows, columns))
    return q, k[0, :, None], rows, columns


def _windows(attention: OneMap, x: Tensor, name: str) -> Grid:
    side, size = isqrt(len(x)), attention.attention_size(x)
    if side**2 != len(x):
        raise ValueError(f"{name} attends in {len(x)} windows, which make no square; choose other layers")
    there = side * size[0], side * size[1]
    if isinstance(attention, Packed) and side > 1:
        # What a window has beyond the edge of the map is padded with zeros, after the norm.
        filled = x.any(-1).unflatten(0, (side, side)).transpose(1, 2).reshape(there)
        there = int(filled.any(1).sum()), int(filled.any(0).sum())
    return Grid((side, side), size, size, there, there, step=size)


def _halo(attention: Halo, x: Tensor, name: str) -> Grid:
    module, size = attention.module, (x.shape[2], x.shape[3])
    if any(length % module.block_size for length in size):
        side = module.block_size
        raise ValueError(
            f"the map of {name} is {size[0]} x {size[1]}, and its blocks of {side} x {side} do not divide it; choose "
            f"another image size, or other layers"
        )
    blocks = size[0] // module.block_size, size[1] // module.block_size
    side, window, block = module.block_size_ds, module.win_size, module.block_size
    query_map = blocks[0] * side, blocks[1] * side
    halo = module.halo_size, module.halo_size
    return Grid(blocks, (side, side), (window, window), query_map, size, (block, block), halo)


def _pooled(attention: MultiScale, *inputs: Any) -> Grid:
    _, q_size, k_size = attention.attention_inputs(*inputs)
    queries, keys = (q_size[0], q_size[1]), (k_size[0], k_size[1])
    return Grid((1, 1), queries, keys, queries, keys, leading=int(attention.module.has_cls_token))
