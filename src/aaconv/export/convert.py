"""Weights of other implementations of the layer, brought into ours: `aaconv convert`.

A layout is the names and shapes that an implementation gives its parameters. It is converted where its formula is the
paper's, so that the converted layer computes the same; otherwise it is refused, with the reason:

legendong    LegenDong/attention-augmented.pytorch: the paper's formula, exactly.
chexpert     kamenbliznashki/chexpert: the paper's formula since its commit def99f9. Before, at a6739a7, the relative
             logits were laid out column by column and the others row by row: the term of pixel (y, x) came from the
             query of pixel (x, y). The weights look alike, so `source` says which commit they were trained with.
             And a stride takes every second pixel for the attention, ours the mean of their neighbourhood.
leaderj1001  leaderj1001/Attention-Augmented-Conv2d: the result of a head, [pixels, depth], is read as [depth, pixels].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..layers.aaconv import AAConv2d
from ..utils.files import check_writable, replacing
from ..utils.terminal import plural
from ..utils.weights import encode, read_weights, write_file

PARTS = ("conv", "qkv", "project")


@dataclass(frozen=True)
class Layout:
    """What the three convolutions and the two tables are called; `tables_by_depth`: [depth, 2 length - 1].

    differs: why nothing of it can be converted exactly. tables_differ: why layers with tables cannot.
    """

    repository: str
    names: tuple[str, str, str]
    tables: tuple[str, str]
    tables_by_depth: bool = False
    differs: str | None = None
    tables_differ: str | None = None


LAYOUTS = {
    "chexpert": Layout(
        "kamenbliznashki/chexpert",
        ("conv", "in_proj_qkv", "out_proj"),
        ("key_rel_h", "key_rel_w"),
        tables_by_depth=True,
    ),
    "legendong": Layout(
        "LegenDong/attention-augmented.pytorch",
        ("conv_layer", "qkv_layer", "attn_layer"),
        ("key_rel_h", "key_rel_w"),
    ),
    "leaderj1001": Layout(
        "leaderj1001/Attention-Augmented-Conv2d",
        ("conv_out", "qkv_conv", "attn_out"),
        ("key_rel_h", "key_rel_w"),
        differs="it reads the result of a head, [pixels, depth], as [depth, pixels], which mixes pixels and channels",
    ),
}


SOURCES = {
    "def99f9": LAYOUTS["chexpert"],
    "a6739a7": replace(
        LAYOUTS["chexpert"],
        # Read column by column, its table of widths weighs the distance of rows, and the other way round.
        tables=("key_rel_w", "key_rel_h"),
        tables_differ="at a6739a7 it takes the relative term of pixel (y, x) from the query of pixel (x, y)",
    ),
}
"""Commits of chexpert from which on its formula was another one, the newest first."""


@dataclass(frozen=True)
class Converted:
    """`state` has our names in the layers and the old ones elsewhere; `layers` has AAConv2d's arguments of each layer.

    Without relative tables the number of heads is in none of the shapes: it is None, and to be set.
    """

    layout: str
    state: dict[str, Tensor]
    layers: dict[str, dict[str, Any]]

    def build(self, name: str, num_heads: int | None = None) -> AAConv2d:
        """The layer of that name, with its weights."""
        arguments = dict(self.layers[name])
        arguments["num_heads"] = num_heads or arguments["num_heads"]
        if arguments["num_heads"] is None:
            raise ValueError(f"the number of heads of {name} is not in its weights; pass num_heads")
        prefix = f"{name}." if name else ""
        layer = AAConv2d(**arguments, dtype=self.state[f"{prefix}qkv.weight"].dtype)
        layer.load_state_dict(
            {key.removeprefix(prefix): value for key, value in self.state.items() if key.startswith(prefix)}
        )
        return layer


def convert(
    state: Mapping[str, Tensor], layout: str | None = None, *, source: str | None = None, inexact: bool = False
) -> Converted:
    """Rename, and where needed transpose, the parameters of every layer of that layout (None: found by the names).

    source: one of SOURCES, the commit that weights of chexpert were trained with, or the last one of these before it.
    inexact: also convert what the formulas disagree on, as a start for more training; the outputs differ.
    """
    if state and all(key.startswith("module.") for key in state):  # what DataParallel adds
        state = {key.removeprefix("module."): value for key, value in state.items()}
    layout = layout or _find_layout(state)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    known = _of_source(layout, source)
    if known.differs:
        raise ValueError(f"weights of {known.repository} cannot be converted: {known.differs}")
    ends = f"{known.names[1]}.weight"
    prefixes = [key.removesuffix(ends) for key in state if key == ends or key.endswith(f".{ends}")]
    if not prefixes:
        raise ValueError(f"there is no layer in the layout {layout}: none of the names ends in {ends}")
    converted = dict(state)
    layers = {}
    for prefix in prefixes:
        own = _rename(converted, prefix, known)
        layers[prefix.removesuffix(".")] = _arguments(own, prefix)
        if "rel_h" in own and known.tables_differ:
            _check_inexact(prefix, known, own, inexact)
        converted |= {prefix + name: tensor for name, tensor in own.items()}
    return Converted(layout, converted, layers)


def _of_source(layout: str, source: str | None) -> Layout:
    if source is None:
        return LAYOUTS[layout]
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    if layout != "chexpert":
        raise ValueError(f"source={source} is a commit of chexpert, and these weights are in the layout {layout}")
    return SOURCES[source]


def _find_layout(state: Mapping[str, Tensor]) -> str:
    for name, layout in LAYOUTS.items():
        if any(f".{key}".endswith(f".{layout.names[1]}.weight") for key in state):
            return name
    expected = ", ".join(f"{layout.names[1]}.weight ({name})" for name, layout in LAYOUTS.items())
    raise ValueError(f"no layer of a known layout is among the {len(state)} weights; looked for {expected}")


def _rename(state: dict[str, Tensor], prefix: str, layout: Layout) -> dict[str, Tensor]:
    """Take one layer's parameters out of the state: by our names."""
    own = {}
    for part, name in zip(PARTS, layout.names, strict=True):
        for end in ("weight", "bias"):
            if (tensor := state.pop(f"{prefix}{name}.{end}", None)) is not None:
                own[f"{part}.{end}"] = tensor
    for ours, name in zip(("rel_h", "rel_w"), layout.tables, strict=True):
        if (table := state.pop(f"{prefix}{name}", None)) is not None:
            own[ours] = table.T.contiguous() if layout.tables_by_depth and table.dim() == 2 else table
    return own


def _arguments(own: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """AAConv2d's arguments out of the shapes of one layer's parameters; a ValueError where they do not fit together."""

    def need(fits: bool, what: str) -> None:
        if not fits:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in own.items())
            raise ValueError(f"the layer {prefix.removesuffix('.') or '(itself)'} is damaged, {what}: {shapes}")

    need("project.weight" in own, "it has no output projection")
    need(("rel_h" in own) == ("rel_w" in own), "it has one relative table of two")
    qkv, project, conv = own["qkv.weight"], own["project.weight"], own.get("conv.weight")
    need(qkv.dim() == project.dim() == 4 and qkv.shape[2:] == project.shape[2:] == (1, 1), "projections must be 1 x 1")
    value_channels = project.shape[0]
    key_channels, odd = divmod(qkv.shape[0] - value_channels, 2)
    need(not odd and key_channels > 0 and project.shape[1] == value_channels, "queries and keys differ in depth")
    heads = size = None
    if "rel_h" in own:
        tables = own["rel_h"], own["rel_w"]
        need(all(table.dim() == 2 and table.shape[0] % 2 for table in tables), "a table has 2 length - 1 rows")
        depth = tables[0].shape[1]
        need(depth == tables[1].shape[1] and key_channels % depth == 0, "the tables do not fit the keys")
        heads, size = key_channels // depth, tuple((table.shape[0] + 1) // 2 for table in tables)
    if conv is not None:
        need(conv.dim() == 4 and qkv.shape[1] % conv.shape[1] == 0, "the convolution has other input channels")
    return {
        "in_channels": qkv.shape[1],
        "out_channels": value_channels + (0 if conv is None else conv.shape[0]),
        "kernel_size": (1, 1) if conv is None else tuple(conv.shape[2:]),
        "groups": 1 if conv is None else qkv.shape[1] // conv.shape[1],
        "bias": "conv.bias" in own,
        "num_heads": heads,
        "key_channels": key_channels,
        "value_channels": value_channels,
        "size": size,
        "position": "none" if size is None else "relative",
        "attention_bias": "qkv.bias" in own,
    }


def _check_inexact(prefix: str, layout: Layout, own: dict[str, Tensor], inexact: bool) -> None:
    layer = prefix.removesuffix(".") or "the layer"
    if own["rel_h"].shape != own["rel_w"].shape:
        raise ValueError(f"{layer} of {layout.repository} cannot be converted: {layout.tables_differ}, and its map is "
                         "not square")  # fmt: skip
    if not inexact:
        raise ValueError(
            f"{layer} of {layout.repository} cannot be converted exactly: {layout.tables_differ}; "
            "--inexact converts it as a start for more training"
        )


def convert_file(
    weights: str | Path,
    path: str | Path,
    *,
    layout: str | None = None,
    source: str | None = None,
    inexact: bool = False,
) -> list[str]:
    """Convert a .pt (of tensors only) or .safetensors file into a .safetensors file; lines that say what was found."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"the file to write must end in .safetensors, got {str(path)!r}")
    check_writable(path)
    converted = convert(read_weights(weights), layout, source=source, inexact=inexact)
    with replacing(path) as draft:
        write_file(draft, encode(converted.state))
    lines = [
        f"{name or '(itself)'}: AAConv2d({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in converted.layers.items()
    ]
    if source is None and converted.layout == "chexpert" and any(made["size"] for made in converted.layers.values()):
        lines.append("taken as trained with chexpert's commit def99f9 or later; if before, pass --source a6739a7")
    count = plural(len(converted.layers), "layer")
    return [*lines, f"wrote {path}: {count} of the layout {converted.layout}, {len(converted.state)} weights"]
