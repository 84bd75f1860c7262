"""Parameters, FLOPs and attention-map memory of any torch model, without running it at real size.

The model runs once, batch 1, on meta tensors (shapes without storage), and every operation is counted by the rules of
`flops.py`. A multiply-add is two FLOPs; timm, fvcore and many papers count it as one, so their figures are half of
ours. `flops` is the paper's count, `true_flops` the same plus every batched matrix product. The attention of an
AAConv2d is counted by the paper's listing, whichever backend runs it: torch's FlopCounterMode also counts what the sdpa
form adds to the depth of the keys. Map memory is that of maps in bfloat16, 2 heads (height * width)^2 bytes per layer.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import timm
import torch
from rich.table import Table
from torch import Tensor, nn

from ..layers import dry_run
from ..layers.aaconv import AAConv2d, AAConvNd
from ..layers.channels import RatioWarning
from ..models import check_name, create_without_memory, list_models
from ..utils.terminal import console, readable_bytes
from .dispatch import TorchDispatchMode
from .flops import RULES, SLIDING, Ops, aten, attention_ops

LARGEST_SIZE_TRIED = 1024
LARGEST_SIZE = 10**5  # far larger, and the sizes in bytes overflow
TOTALS = ("params", "flops", "true_flops", "map_bytes")


@dataclass(frozen=True)
class LayerCost:
    """One module's own cost, without that of the modules inside it."""

    name: str
    kind: str
    output: tuple[int, ...] | None
    params: int
    flops: int
    true_flops: int
    map_bytes: int


@dataclass(frozen=True)
class AttentionCost:
    """The attention branch of one AAConv2d: pooling, projections, tables and the attention itself, no convolution."""

    name: str
    num_heads: int
    key_channels: int
    value_channels: int
    height: int
    width: int
    params: int
    flops: int
    true_flops: int
    map_bytes: int


@dataclass(frozen=True)
class Cost:
    """What one image of `size` (height, width) costs: by layer, the attention branches, and in total."""

    model: str
    size: tuple[int, int]
    layers: list[LayerCost]
    attention: list[AttentionCost]

    @property
    def params(self) -> int:
        return sum(layer.params for layer in self.layers)

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    @property
    def true_flops(self) -> int:
        return sum(layer.true_flops for layer in self.layers)

    @property
    def map_bytes(self) -> int:
        """Bytes of all attention maps together, as training stores them."""
        return sum(layer.map_bytes for layer in self.layers)

    @property
    def gflops(self) -> float:
        return self.flops / 1e9

    @property
    def true_gflops(self) -> float:
        return self.true_flops / 1e9

    def summary(self) -> dict:
        return {"model": self.model, "size": list(self.size), **{total: getattr(self, total) for total in TOTALS}}


def count(
    model: nn.Module, size: tuple[int, int] | None = None, *, channels: int | None = None, name: str | None = None
) -> Cost:
    """Count `model` on one image of `size` (height, width).

    `size` defaults to the model's own (timm's pretrained_cfg, else 224 x 224), `channels` to those of its first
    convolution. The model keeps its weights, device and mode; nothing of real size is allocated.
    """
    model = dry_run.uncompiled(model)
    name = name or type(model).__name__
    channels, height, width = _input_shape(model, size, channels)
    try:
        twin, counter = _run(model, channels, height, width)
    except (RuntimeError, AssertionError, ArithmeticError) as error:
        smallest = _smallest_size(model, channels, height, width) if isinstance(error, _EmptyMapError) else None
        if smallest is None:
            raise ValueError(f"{name} does not run on {channels} x {height} x {width} images: {error}") from error
        raise ValueError(
            f"size {height} x {width} is too small for {name}: layer {error.layer} would be empty; "
            f"the smallest size that works is {smallest[0]} x {smallest[1]}"
        ) from None
    layers = _layers(twin, counter)
    return Cost(name, (height, width), layers, _attention(twin, counter, layers))


def count_named(name: str, size: tuple[int, int] | None = None, **options) -> Cost:
    """Count a registered model, built for `size` with `options`, without allocating its weights; remembered."""
    check_name(name)
    if size is None and timm.is_model(name):
        size = (timm.get_pretrained_cfg_value(name, "input_size") or (3, 224, 224))[1:]
    return _count_named(name, None if size is None else tuple(size), **options)


@functools.cache
def _count_named(name: str, size: tuple[int, int] | None, **options) -> Cost:
    return count(build(name, size, **options), size, name=name)


def build(name: str, size: tuple[int, int] | None = None, **options) -> nn.Module:
    """A registered model over meta tensors. Models whose parameters depend on the image size are built for `size`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RatioWarning)  # the count shows what a ratio came to
        if size is None:
            return create_without_memory(name, **options)
        _check_size(*size)
        try:
            return create_without_memory(name, img_size=size, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return create_without_memory(name, **options)


def _input_shape(model: nn.Module, size: tuple[int, int] | None, channels: int | None) -> tuple[int, int, int]:
    default = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224)
    if channels is None:
        convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d | AAConv2d))
        channels = next((module.in_channels for module in convolutions), default[0])
    height, width = size or default[1:]
    _check_size(height, width)
    return channels, height, width


def _check_size(height: int, width: int) -> None:
    if min(height, width) < 1 or max(height, width) > LARGEST_SIZE:
        raise ValueError(f"height and width must be 1 to {LARGEST_SIZE:,}, got size=({height}, {width})")


class _EmptyMapError(RuntimeError):
    def __init__(self, layer: str, reason: object):
        self.layer = layer or "(the model itself)"
        super().__init__(f"layer {self.layer}: {reason}")


class _Counter(TorchDispatchMode):
    """Counts the operations of a forward pass for the module that is running, by module name."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.running: list[str] = [""]
        self.inside_attention = False
        self.ops: dict[str, Ops] = defaultdict(Ops)
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.maps: dict[str, tuple[int, int]] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._enter, name))
            module.register_forward_hook(functools.partial(self._leave, name))
            if isinstance(module, AAConvNd):
                module.backend = "eager"  # runs on meta tensors; its own operations are not counted
                module.qkv.register_forward_hook(functools.partial(self._attend, name, module))
                module.project.register_forward_pre_hook(self._attended)

    def _enter(self, name: str, module: nn.Module, inputs) -> None:
        self.running.append(name)

    def _leave(self, name: str, module: nn.Module, inputs, output) -> None:
        self.running.pop()
        if isinstance(output, Tensor):
            self.outputs[name] = tuple(output.shape)

    def _attend(self, name: str, layer: AAConvNd, _, inputs, qkv: Tensor) -> None:
        self.inside_attention = True
        height, width = qkv.shape[-2:]
        self.maps[name] = (height, width)
        self.ops[name] += attention_ops(
            height,
            width,
            num_heads=layer.num_heads,
            key_channels=layer.key_channels,
            value_channels=layer.value_channels,
            relative_lengths=[
                length for length, table in ((height, layer.rel_h), (width, layer.rel_w)) if table is not None
            ],
            share_heads=layer.share_heads,
        )

    def _attended(self, _, inputs) -> None:
        self.inside_attention = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operation, kwargs = func.overloadpacket, kwargs or {}
        if operation is aten.native_batch_norm:  # free, and torch takes most of a pass to find the shape it knows
            x = args[0]
            return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if operation in SLIDING:
                raise _EmptyMapError(self.running[-1], error) from error
            raise
        if operation in SLIDING and (out[0] if isinstance(out, tuple) else out).numel() == 0:  # torch 2.11 lets it pass
            raise _EmptyMapError(self.running[-1], "no output pixel is left")
        if operation in RULES and not self.inside_attention:
            self.ops[self.running[-1]] += RULES[operation](out, *args, **kwargs)
        return out


def _run(model: nn.Module, channels: int, height: int, width: int) -> tuple[nn.Module, _Counter]:
    """One forward pass of a copy of the model over meta tensors; the model itself is left alone."""
    twin = dry_run.copy_without_memory(model)[0].float()
    counter = _Counter(twin)
    with counter:
        dry_run.run(twin, torch.empty(1, channels, height, width, device="meta"))
    return twin, counter


def _smallest_size(model: nn.Module, channels: int, height: int, width: int) -> tuple[int, int] | None:
    """The smallest size from this one up that runs, side by side; None where not even the largest tried does."""

    def runs(height: int, width: int) -> bool:
        try:
            _run(model, channels, height, width)
        except Exception:  # too small, or a model made for one size that says so in its own way
            return False
        return True

    def smallest(side: int, runs_at: Callable[[int], bool]) -> int:
        if runs_at(side):
            return side
        low, high = side, LARGEST_SIZE_TRIED
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if runs_at(middle) else (middle, high)
        return high

    if not runs(LARGEST_SIZE_TRIED, LARGEST_SIZE_TRIED):
        return None
    height = smallest(height, lambda side: runs(side, LARGEST_SIZE_TRIED))
    return height, smallest(width, lambda side: runs(height, side))


def _layers(model: nn.Module, counter: _Counter) -> list[LayerCost]:
    layers, counted = [], set()
    for name, module in model.named_modules():
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in counted]
        counted.update(map(id, own))
        params, ops = sum(parameter.numel() for parameter in own), counter.ops[name]
        true_flops = ops.flops + ops.batched_flops
        if params or true_flops:
            output = counter.outputs.get(name)
            layers.append(LayerCost(name, type(module).__name__, output, params, ops.flops, true_flops, ops.map_bytes))
    return layers


def _attention(model: nn.Module, counter: _Counter, layers: list[LayerCost]) -> list[AttentionCost]:
    branches = []
    for name, module in model.named_modules():
        if name in counter.maps:
            inside = {name, *(f"{name}.{child}".removeprefix(".") for child in ("qkv", "project"))}
            parts = [layer for layer in layers if layer.name in inside]
            sizes = (module.num_heads, module.key_channels, module.value_channels, *counter.maps[name])
            branches.append(AttentionCost(name, *sizes, *(sum(getattr(p, total) for p in parts) for total in TOTALS)))
    return branches


def print_cost(name: str, size: tuple[int, int] | None = None, *, layers: bool = False, as_json: bool = False) -> None:
    """Print what the registered model `name` costs on one image, with its layers if asked for."""
    cost = count_named(name, size)
    if as_json:
        extra = {key: [asdict(row) for row in getattr(cost, key)] for key in ("layers", "attention")} if layers else {}
        print(json.dumps(cost.summary() | extra, indent=2))
        return
    output = console()
    if layers:
        output.print(_layer_table(cost))
    if cost.attention:
        output.print(_attention_table(cost))
    output.print(f"[bold]{cost.model}[/bold] on one image of {cost.size[0]} x {cost.size[1]}", highlight=False)
    output.print(f"  parameters  {cost.params:>15,}")
    output.print(f"  FLOPs       {cost.flops:>15,}  as the paper counts: batched matrix products count nothing")
    output.print(f"  FLOPs       {cost.true_flops:>15,}  with the batched Q K^T and A V; a multiply-add is two")
    if cost.map_bytes:
        largest = max(layer.map_bytes for layer in cost.layers)
        maps, most = readable_bytes(cost.map_bytes), readable_bytes(largest)
        output.print(f"  maps        {maps:>15}  in all, bfloat16; {most} the largest layer")


def print_models(pattern: str = "*", *, as_json: bool = False) -> None:
    """List the models of this package whose name fits `pattern`, with parameters and both counts."""
    names = _named(pattern)
    weights = {name: timm.get_pretrained_cfg(name).description for name in names if timm.is_model_pretrained(name)}
    if as_json:
        print(json.dumps([count_named(name).summary() | {"weights": weights.get(name)} for name in names], indent=2))
        return
    last = ["pretrained on"] if weights else []
    table = _new_table("model", "size", "params", "GFlops (paper)", "GFlops (true)", "maps", *last)
    for name in names:
        cost = count_named(name)
        maps = readable_bytes(cost.map_bytes) if cost.map_bytes else "-"
        gflops = (f"{cost.gflops:.3f}", f"{cost.true_gflops:.3f}")
        about = [weights.get(name, "")] if weights else []
        table.add_row(name, "{} x {}".format(*cost.size), f"{cost.params:,}", *gflops, maps, *about)
    console().print(table)


def _named(pattern: str) -> list[str]:
    """Our names that fit the pattern; a bare word may stand anywhere in a name."""
    pattern = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    names = list_models(pattern)
    if not names:
        raise ValueError(f"no model fits {pattern!r}; without a pattern all {len(list_models())} are listed")
    return names


def _layer_table(cost: Cost) -> Table:
    table = _new_table("layer", "kind", "output", "params", "FLOPs (paper)", "FLOPs (true)", "maps")
    for layer in cost.layers:
        output = " x ".join(map(str, layer.output[1:])) if layer.output else ""
        maps = readable_bytes(layer.map_bytes) if layer.map_bytes else ""
        counts = (f"{number:,}" if number else "" for number in (layer.params, layer.flops, layer.true_flops))
        table.add_row(layer.name or "(model)", layer.kind, output, *counts, maps)
    return table


def _attention_table(cost: Cost) -> Table:
    table = _new_table(
        "attention branch of", "map", "heads", "dk", "dv", "params", "FLOPs (paper)", "FLOPs (true)", "maps"
    )
    for branch in cost.attention:
        sizes = map(str, (branch.num_heads, branch.key_channels, branch.value_channels))
        counts = (f"{number:,}" for number in (branch.params, branch.flops, branch.true_flops))
        table.add_row(
            branch.name, f"{branch.height} x {branch.width}", *sizes, *counts, readable_bytes(branch.map_bytes)
        )
    return table


def _new_table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    return table
