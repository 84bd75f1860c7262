"""augment: turn convolutions of any network into attention augmented ones."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .aaconv import AAConv2d, AAConvNd
from .dry_run import copy_without_memory, run

Where = str | re.Pattern[str] | Iterable[str] | Callable[[str, nn.Conv2d], bool]
Size = tuple[int, int]
Example = Tensor | int | Sequence[int] | Sequence[Tensor]


@dataclass(frozen=True)
class Replacement:
    """One convolution that became an AAConv2d."""

    name: str
    size: Size
    attention_size: Size
    key_channels: int
    value_channels: int
    parameters_before: int
    parameters_after: int


@dataclass(frozen=True)
class Report:
    """What augment did; print it for a table."""

    replacements: tuple[Replacement, ...]

    @property
    def parameters_before(self) -> int:
        return sum(row.parameters_before for row in self.replacements)

    @property
    def parameters_after(self) -> int:
        return sum(row.parameters_after for row in self.replacements)

    def __str__(self) -> str:
        head = ("layer", "map", "attends at", "dk", "dv", "parameters", "augmented")
        rows = [
            (
                row.name,
                "{} x {}".format(*row.size),
                "{} x {}".format(*row.attention_size),
                str(row.key_channels),
                str(row.value_channels),
                f"{row.parameters_before:,}",
                f"{row.parameters_after:,}",
            )
            for row in self.replacements
        ]
        rows.append(("in all", "", "", "", "", f"{self.parameters_before:,}", f"{self.parameters_after:,}"))
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in (head, *rows)
        ]
        return "\n".join(line.rstrip() for line in lines)


def augment(
    model: nn.Module,
    example: Example,
    *,
    where: Where,
    downsample: bool | int | Callable[[str, nn.Conv2d, Size], bool | int] = False,
    grouped: bool = False,
    **options: Any,
) -> tuple[nn.Module, Report]:
    """Put AAConv2d in the place of convolutions of `model`, in place; returns the model and a report.

    example: what the network will see, for the map sizes: a tensor (a tuple of them for a forward that takes several),
        (height, width), (channels, height, width) or (batch, channels, height, width). A dry run over meta tensors
        finds the sizes; it costs no memory.
    where: which convolutions: a glob over module names ("layer[234].*.conv2"), a compiled regular expression, a list of
        names, or a callable (name, conv) -> bool. Names that match something else than a convolution are passed over.
    downsample: as in AAConv2d, or a callable (name, conv, (height, width) of its output) -> bool | int.
    grouped: also take grouped and depthwise convolutions. The first channels of every group stay convolutional, so the
        later layers see them in another order.
    options: AAConv2d's keyword arguments (num_heads, key_ratio, value_ratio, position, ...).

    What stays convolutional keeps its weights, so a pretrained network stays useful.
    """
    chosen = _choose(model, where, grouped)
    maps = _map_sizes(model, example, chosen)
    layers: dict[nn.Conv2d, AAConv2d] = {}
    replacements = []
    for conv, names in chosen.items():
        in_size, out_size = maps[conv]
        settings = dict(options)
        settings["downsample"] = downsample(names[0], conv, out_size) if callable(downsample) else downsample
        try:
            layers[conv] = _augmented(conv, in_size, out_size, settings)
        except ValueError as error:
            raise ValueError(f"{names[0]}: {error}") from None
        size = layers[conv].attention_size(*in_size)
        channels = layers[conv].key_channels, layers[conv].value_channels
        counts = _count(conv), _count(layers[conv])
        replacements.append(Replacement(names[0], out_size, size, *channels, *counts))
    # Only now, so that an error above leaves the model as it was.
    for conv, names in chosen.items():
        for name in names:
            if not name:
                model = layers[conv]
            else:
                model.set_submodule(name, layers[conv])
    return model, Report(tuple(replacements))


def _choose(model: nn.Module, where: Where, grouped: bool) -> dict[nn.Conv2d, list[str]]:
    """The convolutions that `where` names, each with all the names it has in the model."""
    convs = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Conv2d) and not _inside_augmented(model, name)
    }
    matches = _matcher(where, convs)
    chosen: dict[nn.Conv2d, list[str]] = {}
    for name, conv in convs.items():
        if matches(name, conv) or conv in chosen:
            chosen.setdefault(conv, []).append(name)
    if not convs:
        raise ValueError("the model has no Conv2d to augment")
    if not chosen:
        raise ValueError(
            f"where={where!r} matches none of the {len(convs)} convolutions, such as {', '.join([*convs][:4])}"
        )
    for conv, names in chosen.items():
        if conv.groups > 1 and not grouped:
            kind = "depthwise" if conv.groups == conv.in_channels else "grouped"
            raise ValueError(
                f"{names[0]} is a {kind} convolution (groups={conv.groups}): its channels do not see each other, and "
                f"attention would mix them; leave it out of `where`, or pass grouped=True to augment it all the same"
            )
    return chosen


def _matcher(where: Where, convs: dict[str, nn.Conv2d]) -> Callable[[str, nn.Conv2d], bool]:
    if isinstance(where, str):
        return lambda name, conv: fnmatchcase(name, where)
    if isinstance(where, re.Pattern):
        return lambda name, conv: where.fullmatch(name) is not None
    if callable(where):
        return where
    if not isinstance(where, Iterable):
        raise ValueError(f"where must be a glob, a regular expression, names or a callable, got where={where!r}")
    names = set(where)
    for name in sorted(names - convs.keys()):
        near = get_close_matches(name, convs, n=3)
        raise ValueError(
            f"where names {name!r}, which is no convolution of the model; nearest: {', '.join(near) or 'none'}"
        )
    return lambda name, conv: name in names


def _inside_augmented(model: nn.Module, name: str) -> bool:
    """Whether the module is a part of a layer that is augmented already."""
    parents = name.split(".")[:-1]
    return any(isinstance(model.get_submodule(".".join(parents[:i])), AAConvNd) for i in range(len(parents) + 1))


def _map_sizes(model: nn.Module, example: Example, convs: Collection[nn.Conv2d]) -> dict[nn.Conv2d, tuple[Size, Size]]:
    """(height, width) into and out of every convolution; the largest where it runs several times."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} is lazy, so the dry run cannot use it; run the model once before")
    sizes: dict[nn.Conv2d, tuple[Size, Size]] = {}

    def recorder(conv: nn.Conv2d) -> Callable[..., None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor], output: Tensor) -> None:
            map_in = inputs[0] if inputs else keywords["input"]
            seen = tuple(map_in.shape[-2:]), tuple(output.shape[-2:])
            sizes[conv] = max(sizes.get(conv, seen), seen)

        return record

    inputs = _example_inputs(model, example)
    try:
        dry, copied = copy_without_memory(model)
        for conv in convs:
            copied[id(conv)].register_forward_hook(recorder(conv), with_kwargs=True)
        run(dry, *inputs)
    except Exception as error:
        shapes = " and ".join(str(list(x.shape)) for x in inputs)
        reason = [*str(error).strip().splitlines(), type(error).__name__][0]
        raise ValueError(f"the dry run with an input of shape {shapes} failed: {reason}") from error
    for name, module in model.named_modules():
        if module in convs and module not in sizes:
            raise ValueError(f"{name} did not run in the dry run, so its map size is unknown; leave it out of `where`")
    return sizes


def _example_inputs(model: nn.Module, example: Example) -> tuple[Tensor, ...]:
    """What the forward takes; a wanted shape without memory, in the dtype of the model."""
    if isinstance(example, Tensor):
        return (example,)
    shape = tuple(example) if isinstance(example, Sequence) else (example, example)
    if shape and all(isinstance(part, Tensor) for part in shape):
        return shape
    if len(shape) == 2:
        shape = (next(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), *shape)
    if len(shape) == 3:
        shape = (1, *shape)
    if len(shape) != 4 or not all(isinstance(length, int) and length > 0 for length in shape):
        raise ValueError(
            f"example must be a tensor or several, (height, width), (C, H, W) or (N, C, H, W), got {example!r}"
        )
    return (torch.empty(shape, dtype=next(model.parameters()).dtype, device="meta"),)


def _augmented(conv: nn.Conv2d, in_size: Size, out_size: Size, options: dict[str, Any]) -> AAConv2d:
    """The layer for the conv's place, its tables made for the map of the dry run."""
    layer = AAConv2d.from_conv(conv, **options)
    if layer.output_size(*in_size) != out_size:
        # Some convolutions pad inside their forward, as TensorFlow's "same" (timm's Conv2dSame).
        layer = AAConv2d.from_conv(conv, pads_itself=True, **options)
    if layer.output_size(*in_size) != out_size:
        raise ValueError(f"cannot align attention with a convolution that maps {in_size} to {out_size}")
    layer.make_tables(*in_size)
    return layer


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
