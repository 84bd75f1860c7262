"""Parameters, FLOPs and attention-map memory of any torch model, without running it at real size.

The model runs once, batch 1, on meta tensors (shapes without storage), and every operation is counted by the rules of
`flops.py`. A multiply-add is two FLOPs; timm, fvcore and many papers count it as one, so their figures are half of
ours. `flops` is the paper's count, `true_flops` the same plus every batched matrix product. The attention of an
AAConv2d is counted by the paper's listing, whichever backend runs it: torch's FlopCounterMode also counts what the sdpa
form adds to the depth of the keys. Map memory is that of maps in bfloat16, 2 heads (height * width)^2 bytes per layer,
or 2 heads height * width times the keys of a window.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from torch import Tensor, nn

from ..layers import dry_run
from ..layers.aaconv import AAConv2d, AAConvNd
from ..layers.augment import augment
from ..layers.channels import RatioWarning
from ..models import check_name, create_without_memory
from .dispatch import TorchDispatchMode
from .flops import RULES, SLIDING, Ops, aten, attention_ops
from .totals import TOTALS, AttentionCost, Cost, LayerCost

LARGEST_SIZE_TRIED = 1024
LARGEST_SIZE = 10**5  # far larger, and the sizes in bytes overflow


def count(
    model: nn.Module, size: tuple[int, int] | None = None, *, channels: int | None = None, name: str | None = None
) -> Cost:
    """Count `model` on one image of `size` (height, width).

    `size` defaults to the model's own (timm's pretrained_cfg, else 224 x 224), `channels` to those of its first
    convolution. The model keeps its weights, device and mode; nothing of real size is allocated.

    >>> count(nn.Conv2d(3, 8, 3, padding=1), (32, 32)).params
    224
    """
    model = dry_run.uncompiled(model)
    name = name or type(model).__name__
    channels, height, width = _input_shape(model, size, channels)
    try:
        twin, counter = _run(model, channels, height, width)
    except (RuntimeError, AssertionError, ArithmeticError) as error:
        smallest = _smallest_size(model, channels, height, width) if isinstance(error, _EmptyMapError) else None
        if smallest is None or not isinstance(error, _EmptyMapError):
            raise ValueError(f"{name} does not run on {channels} x {height} x {width} images: {error}") from error
        raise ValueError(
            f"size {height} x {width} is too small for {name}: layer {error.layer} would be empty; "
            f"the smallest size that works is {smallest[0]} x {smallest[1]}"
        ) from None
    layers = _layers(twin, counter)
    totals = {total: sum(getattr(layer, total) for layer in layers) for total in TOTALS}
    totals["largest_map"] = max((layer.map_bytes for layer in layers), default=0)
    return Cost(name, (height, width), **totals, attention=_attention(twin, counter, layers), layers=layers)


def count_named(name: str, size: tuple[int, int] | None = None, **options: Any) -> Cost:
    """Count a registered model, built for `size` with `options`, without allocating its weights; remembered."""
    check_name(name)
    if size is None and timm.is_model(name):
        size = (timm.get_pretrained_cfg_value(name, "input_size") or (3, 224, 224))[1:]
    return _count_named(name, None if size is None else tuple(size), **options)


def count_augmented(name: str, size: tuple[int, int] | None, keywords: Mapping[str, Any]) -> Cost:
    """Count a registered model that aaconv.augment has changed, without allocating its weights."""
    check_name(name)
    model = build(name, size)
    _, height, width = _input_shape(model, size, None)
    try:
        model, _ = augment(model, (height, width), **keywords)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return count(model, (height, width), name=f"{name}, augmented")


@functools.cache
def _count_named(name: str, size: tuple[int, int] | None, **options: Any) -> Cost:
    return count(build(name, size, **options), size, name=name)


def build(name: str, size: tuple[int, int] | None = None, **options: Any) -> nn.Module:
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

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.running.append(name)

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self.running.pop()
        if isinstance(output, Tensor):
            self.outputs[name] = tuple(output.shape)

    def _attend(self, name: str, layer: AAConvNd, _: nn.Module, inputs: Any, qkv: Tensor) -> None:
        self.inside_attention = True
        height, width = qkv.shape[-2:]
        self.maps[name] = (height, width)
        rows, columns = layer.window.keys(height, width) if layer.window else (height, width)
        self.ops[name] += attention_ops(
            height,
            width,
            num_heads=layer.num_heads,
            key_channels=layer.key_channels,
            value_channels=layer.value_channels,
            relative_lengths=[
                length for length, table in ((rows, layer.rel_h), (columns, layer.rel_w)) if table is not None
            ],
            share_heads=layer.share_heads,
            keys=rows * columns,
        )

    def _attended(self, _: nn.Module, inputs: Any) -> None:
        self.inside_attention = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    layers: list[LayerCost] = []
    counted: set[int] = set()
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
