"""augment: turn convolutions of any network into attention augmented ones."""

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .aaconv import AAConv2d
from .augment_report import Replacement, Report, Size
from .channels import RatioWarning, resolve_channels
from .dry_run import copy_without_memory, run, uncompiled
from .parameters import exclude_from_weight_decay
from .where import Where, choose, put_in

Example = Tensor | int | Sequence[int] | Sequence[Tensor]
Rule = Mapping[str, Any] | Callable[[str, nn.Conv2d, Size], Any]
"""From names of convolutions, or globs over them, or (name, conv, (height, width) of its output), to an option of that
layer."""
Downsample = bool | int | Rule
Window = int | tuple[int, int] | None | Rule
Heads = int | None | Rule
RULES = {"downsample", "window", "num_heads"}
"""The options that may be a rule."""

OPTIONS = {
    parameter.name
    for parameter in inspect.signature(AAConv2d).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
} - {"device", "dtype", *RULES}
"""AAConv2d's other keywords that a caller may choose; all else follows from the convolution."""
SIZE_OPTIONS = OPTIONS & inspect.signature(resolve_channels).parameters.keys()


def augment(
    model: nn.Module,
    example: Example,
    *,
    where: Where,
    downsample: Downsample = False,
    window: Window = None,
    num_heads: Heads = None,
    grouped: bool = False,
    **options: Any,
) -> tuple[nn.Module, Report]:
    """Put AAConv2d in the place of convolutions of `model`, in place; returns the model and a report.

    example: what the network will see, for the map sizes: a tensor (a tuple of them for a forward that takes several),
        (height, width), (channels, height, width) or (batch, channels, height, width). A dry run over meta tensors
        finds the sizes; it costs no memory.
    where: which convolutions: a glob over module names ("layer[234].*.conv2"), a compiled regular expression, a list of
        names, or a callable (name, conv) -> bool. Names that match something else than a convolution are passed over.
    downsample: as in AAConv2d, or a callable (name, conv, (height, width) of its output) -> bool | int, or a mapping
        from names or globs to numbers: {"layer2.*": 1}. A name goes before a glob, two globs for one layer are refused,
        and layers that it leaves out have the default.
    window: as in AAConv2d, or a callable or a mapping as `downsample`; None attends to the whole map. window_stride and
        window_dilation are for the layers that have one.
    num_heads: as in AAConv2d, or a callable or a mapping as `downsample`: {"layer1.*": 2, "layer2.*": 4}.
    grouped: also take grouped convolutions. The first channels of every group stay convolutional, so the later layers
        see them in another order. Depthwise ones cannot be taken: augment the pointwise convolutions beside them.
    options: AAConv2d's keyword arguments (combine, key_ratio, value_ratio, position, ...).

    By default (combine="concat") attention takes the place of output channels, as in the paper; what stays
    convolutional keeps its weights, but the network has to be trained again. combine="add" breaks nothing: every
    convolution stays whole, grouped and depthwise ones too, the same module in `conv`, and attention comes in behind
    gates that start at zero. The network computes what it computed, to the bit in eval mode, and its old state dicts
    load with strict=False, which then names the attention's parameters alone. Of those the tables, gates and
    temperatures are left out of weight decay: model.no_weight_decay() names them, as timm's optimizers ask.

    What was done is kept in model.augmentations, for aaconv.save_model.

    >>> network = nn.Sequential(nn.Conv2d(3, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 96, 3, padding=1))
    >>> network, report = augment(network, 8, where="2")
    >>> network(torch.randn(1, 3, 8, 8)).shape
    torch.Size([1, 96, 8, 8])
    >>> print(report)
    layer     map  attends at  heads   dk  dv  parameters  augmented
    2       8 x 8       8 x 8      8  160   8      83,040    108,272
    in all                                         83,040    108,272
    """
    _check_options(options)
    if any(uncompiled(module) is not module for module in model.modules()):
        raise ValueError("the model is compiled: augment it first, then torch.compile what augment returns")
    whole = options.get("combine") == "add"
    chosen = choose(model, where, whole=whole, grouped=grouped)
    for option, value in (("downsample", downsample), ("window", window), ("num_heads", num_heads)):
        _check_rule(option, value, [names[0] for names in chosen.values()])
    inputs = example_inputs(model, example)
    maps = map_sizes(model, inputs, chosen)
    layers: dict[nn.Conv2d, AAConv2d] = {}
    replacements, overrides = [], []
    for conv, names in chosen.items():
        in_size, out_size = maps[conv]
        settings = _without(options, SIZE_OPTIONS)
        settings["downsample"] = _of_layer(downsample, 0, names[0], conv, out_size)
        settings["window"] = _of_layer(window, None, names[0], conv, out_size)
        if settings["window"] is None and window is not None:
            settings = _without(settings, {"window_stride", "window_dilation"})
        try:
            channels = _only(options, SIZE_OPTIONS)
            channels["num_heads"] = _of_layer(num_heads, None, names[0], conv, out_size)
            sizes = resolve_channels(conv.out_channels, groups=conv.groups, whole=whole, **channels)
            layers[conv] = _augmented(conv, in_size, out_size, settings | sizes.arguments())
        except ValueError as error:
            raise ValueError(f"{names[0]}: {error}") from None
        replacements.append(_replacement(names[0], conv, layers[conv], in_size, out_size))
        overrides += [(names[0], override) for override in sizes.overrides]
    model = put_in(model, chosen, layers)  # only now, so that an error above leaves the model as it was
    _warn(overrides, len(layers))
    by_name = {names[0]: layers[conv] for conv, names in chosen.items()}
    done: dict[str, Any] = {
        "example": [list(x.shape) for x in inputs],
        "where": where if isinstance(where, str) else [*by_name],
        "downsample": {name: layer.downsample for name, layer in by_name.items()}
        if callable(downsample)
        else downsample,
        "grouped": grouped,
    }
    if callable(window):
        window = {name: layer.window.size for name, layer in by_name.items() if layer.window}
    if callable(num_heads):
        num_heads = {name: layer.num_heads for name, layer in by_name.items()}
    done |= {name: value for name, value in (("window", window), ("num_heads", num_heads)) if value is not None}
    model.__dict__["augmentations"] = (*getattr(model, "augmentations", ()), done | options)
    exclude_from_weight_decay(model)
    return model, Report(tuple(replacements))


def _of_layer(option: Any, otherwise: Any, name: str, conv: nn.Conv2d, out_size: Size) -> Any:
    """An option that may be a rule, of one layer."""
    if callable(option):
        return option(name, conv, out_size)
    if not isinstance(option, Mapping):
        return option
    return next((option[key] for key in _keys_for(name, option)), otherwise)


def _keys_for(name: str, rule: Mapping[str, Any]) -> list[str]:
    """What the mapping has for a layer: its own name or, without it, the globs that fit."""
    return [name] if name in rule else [key for key in rule if fnmatchcase(name, str(key))]


def _check_rule(option: str, rule: Any, augmented: list[str]) -> None:
    """A ValueError where a mapping names a layer that is not augmented, or has two globs for one: its order would have
    to decide, and JSON has none."""
    if option == "num_heads" and isinstance(rule, list | tuple):
        raise ValueError(f"num_heads of several layers is a mapping such as {{'{augmented[0]}': 4}}, got {rule!r}")
    if not isinstance(rule, Mapping):
        return
    for key in rule:
        if not any(key == name or fnmatchcase(name, str(key)) for name in augmented):
            near = get_close_matches(str(key), augmented, n=3) or augmented[:3]
            raise ValueError(f"{option} names {key!r}, which is not augmented; such are {', '.join(near)}")
    for name in augmented:
        if len(keys := _keys_for(name, rule)) > 1:
            raise ValueError(f"{option} has {keys[0]!r} and {keys[1]!r} for {name}; leave it to one, or give its name")


def _check_options(options: dict[str, Any]) -> None:
    for name in sorted(options.keys() - OPTIONS):
        near = get_close_matches(name, OPTIONS | RULES | {"where", "grouped"}, n=3)
        hint = f"nearest: {', '.join(near)}" if near else f"it takes {', '.join(sorted(OPTIONS | RULES))}"
        raise TypeError(f"augment takes no option {name!r}; {hint}")


def _warn(overrides: list[tuple[str, str]], layers: int) -> None:
    """One warning for each ratio that does not decide, however many layers it was meant for."""
    for ratio in ("key_ratio", "value_ratio"):
        found = [(name, override) for name, override in overrides if override.startswith(ratio)]
        if found:
            name, override = found[0]
            others = f" (so in {len(found)} of {layers} layers)" if layers > 1 else ""
            warnings.warn(f"{name}: {override}{others}" if name else override, RatioWarning, stacklevel=3)


def map_sizes(
    model: nn.Module, inputs: Sequence[Tensor], convs: Collection[nn.Conv2d]
) -> dict[nn.Conv2d, tuple[Size, Size]]:
    """(height, width) into and out of every convolution; the largest where it runs several times."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} is lazy, so the dry run cannot use it; run the model once before")
    try:
        sizes = _dry_run(model, inputs, convs)
    except Exception as error:
        shapes = " and ".join(str(list(x.shape)) for x in inputs)
        reason = [*str(error).strip().splitlines(), type(error).__name__][0].partition(". ")[0]
        hint = _part_that_runs(model, inputs, convs)
        raise ValueError(f"the dry run with an input of shape {shapes} failed: {reason}{hint}") from error
    for name, module in model.named_modules():
        if module in convs and module not in sizes:
            raise ValueError(f"{name} did not run in the dry run, so its map size is unknown; leave it out of `where`")
    return sizes


def _dry_run(
    model: nn.Module, inputs: Sequence[Tensor], convs: Collection[nn.Conv2d]
) -> dict[nn.Conv2d, tuple[Size, Size]]:
    sizes: dict[nn.Conv2d, tuple[Size, Size]] = {}

    def recorder(conv: nn.Conv2d) -> Callable[..., None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor], output: Tensor) -> None:
            map_in = inputs[0] if inputs else keywords["input"]
            seen = (map_in.shape[-2], map_in.shape[-1]), (output.shape[-2], output.shape[-1])
            sizes[conv] = max(sizes.get(conv, seen), seen)

        return record

    dry, copied = copy_without_memory(model)
    for conv in convs:
        copied[id(conv)].register_forward_hook(recorder(conv), with_kwargs=True)
    run(dry, *inputs)
    return sizes


def _part_that_runs(model: nn.Module, inputs: Sequence[Tensor], convs: Collection[nn.Conv2d]) -> str:
    """The smallest part of the model that runs on these inputs and holds all the convolutions, as of a detector, whose
    forward takes more than images."""
    names = [name for name, module in model.named_modules() if module in convs]
    path = names[0].split(".")[:-1] if names else []
    for length in range(len(path), 0, -1):
        part = ".".join(path[:length])
        try:
            if set(_dry_run(model.get_submodule(part), inputs, convs)) == set(convs):
                return f"; its part model.{part} runs: augment that, and leave {part}. out of the names in `where`"
        except Exception:  # this part does not take an image, either
            continue
    return ""


def example_inputs(model: nn.Module, example: Example) -> tuple[Tensor, ...]:
    """What the forward takes; a wanted shape without memory, in the dtype of the model."""
    if isinstance(example, Tensor):
        return (example,)
    shape: tuple[Any, ...] = tuple(example) if isinstance(example, Sequence) else (example, example)
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


def _replacement(name: str, conv: nn.Conv2d, layer: AAConv2d, in_size: Size, out_size: Size) -> Replacement:
    return Replacement(
        name,
        out_size,
        size := layer.attention_size(*in_size),
        layer.num_heads,
        layer.key_channels,
        layer.value_channels,
        parameters_before=sum(parameter.numel() for parameter in conv.parameters()),
        parameters_after=sum(parameter.numel() for parameter in layer.parameters()),
        window=layer.window.keys(*size) if layer.window else None,
    )


def _only(options: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def _without(options: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
