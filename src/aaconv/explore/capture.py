"""What a page needs to know of a network: the queries, keys and relative tables of its attention, for some images.

An attention map [heads, HW, HW] is large, and its factors are small: the paper's equation makes any row of it from the
query of that pixel, all keys and the two tables. So these are kept, in 16 bits, and the page computes the rows. What
this costs in precision is measured on every map, against the layer's own `attention_maps`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attention.heads import split_heads
from ..attention.windows import Axis, Window
from ..layers.aaconv import AAConv2d
from ..layers.accelerated import Accelerated
from ..layers.families_2d import OneMap
from ..models import list_models
from ..models.family import KINDS
from . import accelerated

LARGEST_MAP = 2500
"""Pixels of an attention map; the check holds all weights between them at once."""
TOLERANCE = 0.004
"""Of the largest weight of a row: beyond it 16 bits are not enough, and 32 are kept."""
NUMBERS = {"int16": "<i2", "float32": "<f4"}


@dataclass(frozen=True)
class Factors:
    """One layer's attention for one image: q (scaled), k [heads, HW, depth] and, where the positions are relative,
    rel_h [heads or 1, 2 height - 1, depth] and rel_w alike, or those of a window."""

    q: np.ndarray
    k: np.ndarray
    rel_h: np.ndarray | None
    rel_w: np.ndarray | None
    height: int
    width: int
    window: Window | None = None

    def parts(self) -> dict[str, np.ndarray]:
        return {name: part for name in ("q", "k", "rel_h", "rel_w") if (part := getattr(self, name)) is not None}

    def maps(self) -> np.ndarray:
        """The equation as the page computes it, for all rows: [heads, HW (i), HW (j)]."""
        logits = np.einsum("nid,njd->nij", self.q, self.k)
        for axis, (table, length) in enumerate(((self.rel_h, self.height), (self.rel_w, self.width))):
            place = np.indices((self.height, self.width))[axis].ravel()
            around = self.window[axis] if self.window else Axis(length)
            seen, row = (part.numpy()[place][:, place] for part in around.sees(length, torch.device("cpu")))
            if table is not None:
                logits = logits + self._relative(table, row)
            logits = np.where(seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def _relative(self, table: np.ndarray, row: np.ndarray) -> np.ndarray:
        """What a query gives to each key by the row of the table that stands for their distance."""
        by_distance = np.einsum("nid,nmd->nim", self.q, np.broadcast_to(table, (len(self.q), *table.shape[1:])))
        return np.take_along_axis(by_distance, row[None], axis=-1)


@dataclass(frozen=True)
class Packed:
    """Factors as text: one array after the other in base64; 16-bit numbers have one scale per head."""

    kind: str
    shapes: dict[str, tuple[int, ...]]
    scales: dict[str, list[float]]
    text: str
    error: float = 0.0
    """The largest difference between the page's weights and attention_maps, as a part of its row's largest weight."""
    focus: tuple[int, int] = (0, 0)
    """Row and column of the cell whose heads look most sharply,"""
    peak: float = 0.0
    """and how sharply: their largest weights on average, times the number of positions."""

    window: Window | None = None

    def unpack(self, height: int, width: int) -> Factors:
        """The factors of a map of height x width, as the page reads them."""
        numbers = np.frombuffer(base64.b64decode(self.text), NUMBERS[self.kind])
        parts, start = {}, 0
        for name, shape in self.shapes.items():
            stop = start + int(np.prod(shape))
            parts[name] = numbers[start:stop].reshape(shape) * np.array(self.scales[name])[:, None, None]
            start = stop
        return Factors(parts["q"], parts["k"], parts.get("rel_h"), parts.get("rel_w"), height, width, self.window)


@dataclass(frozen=True)
class Layer:
    """An attention as the page names it; depth is that of a head's queries and keys.

    shift: how far its cells lie down and right of an even division of the image, as parts of its height and width.
    window: for rows and columns, the first and the last line that each line sees; None where it sees the whole map.
    """

    name: str
    heads: int
    height: int
    width: int
    depth: int
    stride: int
    downsample: int
    shift: tuple[float, float] = (0.0, 0.0)
    window: dict[str, Any] | None = None

    def cell(self, x: float, y: float) -> tuple[int, int]:
        """(row, column) of the cell that a position, as parts of width and height, lies in."""
        row, column = (y - self.shift[0]) * self.height, (x - self.shift[1]) * self.width
        return min(max(int(row // 1), 0), self.height - 1), min(max(int(column // 1), 0), self.width - 1)

    def centre(self, row: int, column: int) -> tuple[float, float]:
        """x and y, as parts, of the middle of a cell; inside the image."""
        x = (column + 0.5) / self.width + self.shift[1]
        y = (row + 0.5) / self.height + self.shift[0]
        return min(max(x, 0.0), 0.9999), min(max(y, 0.0), 0.9999)


def attention_layers(model: nn.Module, name: str, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The model's AAConv2d layers and accelerated modules by name, all or those that fit one of the wildcard patterns
    or begin with it."""
    layers = {path: module for path, module in model.named_modules() if has_attention(module)}
    if not layers and any(isinstance(vars(module).get("forward"), Accelerated) for module in model.modules()):
        raise ValueError(
            f"queries and keys of {name} (as of HaloNet and MViTv2) do not lie on one map, which is what a page shows; "
            f"{_sibling(name)} that do, and so have SAM's encoders and BoTNets"
        )
    if not layers:
        raise ValueError(
            f"{name} has no AAConv2d layers, so there is no attention to show; {_sibling(name)}, and so has a model "
            f"whose attention aaconv.accelerate knows"
        )
    if not patterns:
        return layers
    chosen = set()
    for pattern in patterns:
        fits = {path for path in layers if fnmatchcase(path, pattern) or path.startswith(f"{pattern}.")}
        if not fits:
            raise ValueError(f"no attention layer of {name} fits {pattern!r}; it has {', '.join(layers)}")
        chosen |= fits
    return {path: layer for path, layer in layers.items() if path in chosen}


def has_attention(module: nn.Module) -> bool:
    """Whether a page can show it: an AAConv2d, or a module that aaconv.accelerate has found to attend over one map."""
    return isinstance(module, AAConv2d) or accelerated.accelerated(module) is not None


def _sibling(name: str) -> str:
    network = name.rpartition("/")[2].partition(".")[0]
    kind, _, rest = network.partition("_")
    network = rest if kind in KINDS else network
    near = next(iter(list_models(f"aa_{network}")), "aa_resnet50")
    return f"{near} has some"


@torch.no_grad()
def capture(
    model: nn.Module, image: Tensor, layers: dict[str, nn.Module]
) -> tuple[Any, list[Layer], dict[str, Packed]]:
    """Run the model on one image [3, height, width]: its output, and every layer's attention, packed."""
    packed: dict[str, Packed] = {}
    facts: dict[str, Layer] = {}

    def keep(name: str, layer: nn.Module, x: Tensor) -> None:
        height, width = _size(layer, x, name)
        if height * width > LARGEST_MAP:
            raise ValueError(
                f"the attention map of {name} is {height} x {width}, and pages take at most {LARGEST_MAP} pixels; "
                f"choose a smaller size, or other layers"
            )
        factors, exact = _factors(layer, x, height, width), _maps(layer, x).double().cpu().numpy()
        if not np.isfinite(exact).all():
            raise ValueError(f"the attention of {name} is not finite: the weights of the network are damaged")
        packed[name] = pack(factors, exact)
        facts[name] = Layer(
            name=name,
            heads=len(factors.q),
            height=height,
            width=width,
            depth=factors.q.shape[-1],
            stride=max(layer.stride) if isinstance(layer, AAConv2d) else 1,
            downsample=layer.downsample if isinstance(layer, AAConv2d) else 0,
            window=None if factors.window is None else _spans(factors.window, height, width),
        )

    hooks = [
        layer.register_forward_pre_hook(
            lambda module, inputs, named, name=name: keep(name, module, next(iter((*inputs, *named.values())))),
            with_kwargs=True,
        )
        for name, layer in layers.items()
    ]
    try:
        output = model(image[None])
    finally:
        for hook in hooks:
            hook.remove()
    if missing := [name for name in layers if name not in packed]:
        raise ValueError(f"the model does not run its layer {missing[0]}; leave it out with other layers")
    return output, [facts[name] for name in layers], packed


def _size(layer: nn.Module, x: Tensor, name: str) -> tuple[int, int]:
    if isinstance(layer, AAConv2d):
        return layer.attention_size(*x.shape[-2:])
    return accelerated.size(_one_map(layer), x, name)


def _maps(layer: nn.Module, x: Tensor) -> Tensor:
    return layer.attention_maps(x)[0] if isinstance(layer, AAConv2d) else accelerated.maps(_one_map(layer), x)


def _factors(layer: nn.Module, x: Tensor, height: int, width: int) -> Factors:
    """The factors of the first image of the layer's input, by the layer's own pooling, projection and tables."""
    parts = _layer_parts(layer, x) if isinstance(layer, AAConv2d) else accelerated.parts(_one_map(layer), x)
    q, k, rel_h, rel_w = parts
    by_row, by_column = (None if table is None else table.cpu().numpy() for table in (rel_h, rel_w))
    window = layer.window if isinstance(layer, AAConv2d) else None
    return Factors(q.cpu().numpy(), k.cpu().numpy(), by_row, by_column, height, width, window)


def _spans(window: Window, height: int, width: int) -> dict[str, Any]:
    """A window as the page reads it."""
    found = {}
    for name, axis, length in (("rows", window.rows, height), ("columns", window.columns, width)):
        seen = [line.nonzero().flatten() for line in axis.sees(length, torch.device("cpu"))[0]]
        spans = [(int(line[0]), int(line[-1])) for line in seen]
        found[name] = {"longest": axis.window, "step": axis.dilation, "spans": spans}
    return found


def _one_map(layer: nn.Module) -> OneMap:
    found = accelerated.accelerated(layer)
    assert found is not None
    return found


def _layer_parts(layer: AAConv2d, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    qkv, *relative = layer.attention_inputs(x)
    q, k, _ = (part[0].flatten(1, 2).double() for part in split_heads(qkv, layer.num_heads, layer.key_channels))
    tables = (None if table is None else table.double() for table in relative)
    rel_h, rel_w = (table[None] if table is not None and table.dim() == 2 else table for table in tables)
    return q * q.shape[-1] ** -0.5, k, rel_h, rel_w


def pack(factors: Factors, exact: np.ndarray) -> Packed:
    """In 16 bits, or in 32 where the maps [heads, HW, HW] would come out too far from the exact ones."""
    for kind in NUMBERS:
        packed = _pack(factors, kind)
        error = _error(packed.unpack(factors.height, factors.width).maps(), exact)
        if error <= TOLERANCE:
            break
    peaks = exact.max(-1).mean(0)
    focus = divmod(int(peaks.argmax()), factors.width)
    return replace(packed, error=error, focus=focus, peak=float(peaks.max() * len(peaks)))


def _pack(factors: Factors, kind: str) -> Packed:
    scales, raw = {}, b""
    for name, part in factors.parts().items():
        scale = np.ones(len(part))
        if kind == "int16":
            scale = np.abs(part).max(axis=(1, 2)).clip(min=1e-30) / 32767
            part = np.rint(part / scale[:, None, None])
        scales[name] = scale.tolist()
        raw += part.astype(NUMBERS[kind]).tobytes()
    shapes = {name: part.shape for name, part in factors.parts().items()}
    return Packed(kind, shapes, scales, base64.b64encode(raw).decode(), window=factors.window)


def _error(maps: np.ndarray, exact: np.ndarray) -> float:
    return float((np.abs(maps - exact) / exact.max(-1, keepdims=True)).max())
