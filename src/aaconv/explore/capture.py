"""What a page needs to know of a network: its attention layers, and what they attend to on some images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.heads import split_heads
from ..attention.windows import Window
from ..layers.aaconv import AAConv2d
from ..layers.accelerated import Accelerated
from ..models import list_models
from ..models.family import KINDS
from . import accelerated
from .factors import Factors, Packed, pack
from .grid import Grid

MOST_WEIGHTS = 4096**2
"""Of a head: SAM's map of 64 x 64 at once. The check holds those of all heads."""


@dataclass(frozen=True)
class Layer:
    """An attention as the page names it; height and width are those of its queries' map, depth that of a head.

    shift: how far its cells lie down and right of an even division of the image, as parts of its height and width;
    key_shift: the same of the keys' cells. keys_seen: by a query; looking evenly it gives each 1 / keys_seen.
    window: for rows and columns, the first and the last line that each line sees; None where it sees the whole map.
    """

    name: str
    heads: int
    height: int
    width: int
    depth: int
    grid: Grid
    keys_seen: int
    stride: int
    downsample: int
    shift: tuple[float, float] = (0.0, 0.0)
    key_shift: tuple[float, float] = (0.0, 0.0)
    window: dict[str, Any] | None = None

    def shifted(self, down: float, right: float) -> Layer:
        """With cells that lie so far, as parts of the image, from an even division. Where queries are fewer than the
        keys of their map every n-th pixel has one, so that theirs lie higher and further left."""
        sides = zip((down, right), self.grid.key_map, self.grid.query_map, strict=True)
        y, x = (shift + (0.5 / keys - 0.5 / queries if queries < keys else 0.0) for shift, keys, queries in sides)
        return replace(self, shift=(y, x), key_shift=(down, right))

    def cell(self, x: float, y: float) -> tuple[int, int]:
        """(row, column) of the query's cell that a position, as parts of width and height, lies in."""
        return _line(y - self.shift[0], self.height), _line(x - self.shift[1], self.width)

    def key_cell(self, x: float, y: float) -> tuple[int, int]:
        """The same of the keys' cells."""
        height, width = self.grid.key_map
        return _line(y - self.key_shift[0], height), _line(x - self.key_shift[1], width)

    def centre(self, row: int, column: int) -> tuple[float, float]:
        """x and y, as parts, of the middle of a cell; inside the image."""
        x = (column + 0.5) / self.width + self.shift[1]
        y = (row + 0.5) / self.height + self.shift[0]
        return min(max(x, 0.0), 0.9999), min(max(y, 0.0), 0.9999)


def _line(part: float, length: int) -> int:
    return min(max(int(part * length // 1), 0), length - 1)


def attention_layers(model: nn.Module, name: str, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The model's AAConv2d layers and accelerated modules by name, all or those that fit one of the wildcard patterns
    or begin with it."""
    layers = {path: module for path, module in model.named_modules() if has_attention(module)}
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
    """Whether a page can show it: an AAConv2d, or a module that aaconv.accelerate knows."""
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

    def keep(name: str, layer: nn.Module, *inputs: Any) -> None:
        grid = _grid(layer, name, *inputs)
        if grid.weights > MOST_WEIGHTS:
            height, width = grid.query_map
            raise ValueError(
                f"the attention map of {name} is {height} x {width}, {grid.weights:,} weights per head, and pages take "
                f"at most {MOST_WEIGHTS:,}; choose a smaller size, or other layers"
            )
        exact = _exact_weights(layer, *inputs)
        if not exact.isfinite().all():
            raise ValueError(f"the attention of {name} is not finite: the weights of the network are damaged")
        window = layer.window if isinstance(layer, AAConv2d) else None
        parts = {part: tensor.cpu().numpy() for part, tensor in _parts(layer, *inputs).items()}
        factors = Factors(parts, grid, window)
        packed[name] = pack(factors, exact)
        heads, _, depth = parts["q"].shape
        facts[name] = Layer(
            name,
            heads,
            *grid.query_map,
            depth,
            grid,
            factors.keys_seen,
            stride=max(layer.stride) if isinstance(layer, AAConv2d) else 1,
            downsample=layer.downsample if isinstance(layer, AAConv2d) else 0,
            window=None if window is None else _spans(window, *grid.query_map),
        )

    hooks = [
        layer.register_forward_pre_hook(
            lambda module, inputs, named, name=name: keep(name, module, *_own(module, *inputs, *named.values())),
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


def _own(layer: nn.Module, *inputs: Any) -> tuple[Any, ...]:
    """Of what a layer is called with, what its attention is computed from: not switches such as output_attentions."""
    return inputs[: 1 if isinstance(layer, AAConv2d) else _accelerated(layer).inputs]


def _grid(layer: nn.Module, name: str, *inputs: Any) -> Grid:
    if isinstance(layer, AAConv2d):
        return Grid.whole(*layer.attention_size(*inputs[0].shape[-2:]))
    return accelerated.grid(_accelerated(layer), name, *inputs)


def _exact_weights(layer: nn.Module, *inputs: Any) -> Tensor:
    """[blocks, heads, queries of a block, its keys]."""
    if isinstance(layer, AAConv2d):
        return layer.attention_maps(inputs[0])
    return accelerated.exact_weights(_accelerated(layer), *inputs)


def _parts(layer: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """The factors of an image, by the layer's own pooling, projection and tables."""
    if not isinstance(layer, AAConv2d):
        return accelerated.parts(_accelerated(layer), *inputs)
    qkv, *relative = layer.attention_inputs(inputs[0])
    q, k, _ = (part[0].flatten(1, 2).double() for part in split_heads(qkv, layer.num_heads, layer.key_channels))
    tables = {
        name: (table[None] if table.dim() == 2 else table).double()
        for name, table in zip(("rel_h", "rel_w"), relative, strict=True)
        if table is not None
    }
    return {"q": q * q.shape[-1] ** -0.5, "k": k, **tables}


def _spans(window: Window, height: int, width: int) -> dict[str, Any]:
    """A window as the page reads it."""
    found = {}
    for name, axis, length in (("rows", window.rows, height), ("columns", window.columns, width)):
        seen = [line.nonzero().flatten() for line in axis.sees(length, torch.device("cpu"))[0]]
        spans = [(int(line[0]), int(line[-1])) for line in seen]
        found[name] = {"longest": axis.window, "step": axis.dilation, "spans": spans}
    return found


def _accelerated(layer: nn.Module) -> Accelerated:
    found = accelerated.accelerated(layer)
    assert found is not None
    return found
