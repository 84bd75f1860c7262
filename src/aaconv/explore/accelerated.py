"""The attention of accelerated modules, unfolded into the image.

SAM's encoder cuts its map into windows and attends in each as if it were an image of its own. A page knows one map:
here the windows lie side by side again, and what keeps them apart is part of the queries and keys, a one-hot of the
window whose product is so large that the softmax leaves nothing for other windows.
"""

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.heads import split_heads
from ..layers.families_2d import OneMap, Packed

APART = 20.0
"""The least logit by which a key of one's own window is ahead of any other: weights below 1e-8 are left for those."""


def accelerated(module: nn.Module) -> OneMap | None:
    """What aaconv.accelerate has put in the place of the module's forward, if it attends over one map."""
    there = vars(module).get("forward")
    return there if isinstance(there, OneMap) else None


def size(attention: OneMap, x: Tensor, name: str) -> tuple[int, int]:
    """(height, width) of the map that one image is for this module, with all its windows."""
    windows, (height, width) = isqrt(len(x)), attention.attention_size(x)
    if windows**2 != len(x):
        raise ValueError(f"{name} attends in {len(x)} windows, which make no square; choose other layers")
    shown = windows * height, windows * width
    if isinstance(attention, Packed):
        # What a window has beyond the edge of the map is padded with zeros, after the norm.
        there = _unfolded(x[:, None])[0].any(-1).unflatten(0, shown)
        real = int(there.any(1).sum()), int(there.any(0).sum())
        if real != shown:
            raise ValueError(
                f"the map of {name} has {real[0]} x {real[1]} cells, and its windows of {height} x {width} reach "
                f"beyond it; choose an image size that makes it a multiple of {height} cells, or other layers"
            )
    return shown


def parts(attention: OneMap, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (scaled) and k [heads, pixels of the whole map, depth], rel_h and rel_w [1, distances, depth]; with windows the
    depth is that of a head and one more for each."""
    qkv, rel_h, rel_w = attention.attention_inputs(x)
    heads = split_heads(qkv.double(), attention.num_heads, attention.key_channels)[:2]
    q, k = (_unfolded(part) for part in heads)
    q, number = q * attention.depth**-0.5, len(x)
    rel_h, rel_w = rel_h.double()[None], rel_w.double()[None]
    if number == 1:
        return q, k, rel_h, rel_w
    longest = [part.norm(dim=-1).max() for part in (q, k, rel_h, rel_w)]
    ahead = (APART + 2 * longest[0] * sum(longest[1:])) ** 0.5  # half of it on either side
    which = ahead * F.one_hot(_windows_of_pixels(number, *qkv.shape[1:3]), number).to(q)
    q, k = (torch.cat([part, which.expand(len(part), -1, -1)], dim=-1) for part in (q, k))
    beyond = [(isqrt(number) - 1) * length for length in qkv.shape[1:3]]
    rel_h, rel_w = (F.pad(table, (0, number, n, n)) for table, n in zip((rel_h, rel_w), beyond, strict=True))
    return q, k, rel_h, rel_w


def maps(attention: OneMap, x: Tensor) -> Tensor:
    """The weights [heads, pixels (i), pixels (j)] of the whole map: none between windows."""
    own = attention.attention_maps(x)
    if len(x) == 1:
        return own[0]
    window = _windows_of_pixels(len(x), *attention.attention_size(x)).to(own.device)
    result = own.new_zeros(own.shape[1], len(window), len(window))
    for number, weights in enumerate(own):
        inside = (window == number).nonzero()[:, 0]
        result[:, inside[:, None], inside] = weights
    return result


def _unfolded(part: Tensor) -> Tensor:
    """[windows, heads, height, width, depth] -> [heads, pixels of the whole map, depth]."""
    side = isqrt(len(part))
    return part.unflatten(0, (side, side)).permute(2, 0, 3, 1, 4, 5).flatten(1, 4)


def _windows_of_pixels(number: int, height: int, width: int) -> Tensor:
    """The number of the window of every pixel of the whole map."""
    windows = torch.arange(number)[:, None, None, None, None].expand(number, 1, height, width, 1)
    return _unfolded(windows)[0, :, 0]
