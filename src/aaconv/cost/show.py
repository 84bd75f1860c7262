"""Costs on a terminal: `aaconv cost` and `aaconv models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..utils.terminal import console, new_table, readable_bytes
from .known import cost_of, known_models, pretrained
from .totals import Cost, Totals

if TYPE_CHECKING:
    from torch import nn


def print_cost(
    model: str | nn.Module,
    size: tuple[int, int] | None = None,
    *,
    augment: Mapping[str, Any] | None = None,
    layers: bool = False,
    as_json: bool = False,
) -> None:
    """Print what a registered model, or one in hand, costs on one image, with its layers if asked for.

    augment: the keywords of aaconv.augment, which changes a registered model before it is counted.
    """
    cost = _counted(model, size, augment) if layers or augment or not isinstance(model, str) else cost_of(model, size)
    if as_json:
        extra = {key: [asdict(row) for row in getattr(cost, key)] for key in ("layers", "attention")} if layers else {}
        print(json.dumps(cost.summary() | extra, indent=2))
        return
    output = console()
    if isinstance(cost, Cost) and layers:
        output.print(_layer_table(cost))
    if cost.attention:
        output.print(_attention_table(cost))
    output.print(f"[bold]{cost.model}[/bold] on one image of {cost.size[0]} x {cost.size[1]}", highlight=False)
    output.print(f"  parameters  {cost.params:>15,}")
    output.print(f"  FLOPs       {cost.flops:>15,}  as the paper counts: batched matrix products count nothing")
    output.print(f"  FLOPs       {cost.true_flops:>15,}  with the batched products Q K^T and A V")
    output.print("  a multiply-add counts as two FLOPs", highlight=False)
    if cost.map_bytes:
        maps, most = readable_bytes(cost.map_bytes), readable_bytes(cost.largest_map)
        output.print(f"  maps        {maps:>15}  in all, bfloat16; {most} the largest layer")


def _counted(model: str | nn.Module, size: tuple[int, int] | None, augment: Mapping[str, Any] | None) -> Cost:
    from .counting import count, count_augmented, count_named

    if not isinstance(model, str):
        return count(model, size)
    return count_named(model, size) if augment is None else count_augmented(model, size, augment)


def print_models(pattern: str = "*", *, as_json: bool = False) -> None:
    """List the models of this package whose name fits `pattern`, with parameters and both counts."""
    models, weights = _named(pattern), pretrained()
    if as_json:
        print(json.dumps([cost_of(name).summary() | {"weights": weights.get(name)} for name in models], indent=2))
        return
    table = _new_table("model", "size", "params", "GFlops\n(paper)", "GFlops\n(true)", "maps")
    for name in models:
        cost = cost_of(name)
        maps = readable_bytes(cost.map_bytes) if cost.map_bytes else "-"
        gflops = (f"{cost.gflops:.3f}", f"{cost.true_gflops:.3f}")
        table.add_row(name, "{} x {}".format(*cost.size), f"{cost.params:,}", *gflops, maps)
    output = console()
    output.print(table)
    for key in (key for name in models for key in weights if key.partition(".")[0] == name):
        output.print(f"pretrained: {key} on {weights[key]}", highlight=False, soft_wrap=True)


def _named(pattern: str) -> list[str]:
    """Our models whose names fit the pattern; a bare word may stand anywhere in a name."""
    ours = known_models()
    pattern = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    found = [name for name in ours if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"no model fits {pattern!r}; without a pattern all {len(ours)} are listed")
    return found


def _layer_table(cost: Cost) -> Table:
    table = _new_table("layer", "kind", "output", "params", "FLOPs (paper)", "FLOPs (true)", "maps")
    for layer in cost.layers:
        output = " x ".join(map(str, layer.output[1:])) if layer.output else ""
        maps = readable_bytes(layer.map_bytes) if layer.map_bytes else ""
        counts = (f"{number:,}" if number else "" for number in (layer.params, layer.flops, layer.true_flops))
        table.add_row(layer.name or "(model)", layer.kind, output, *counts, maps)
    return table


def _attention_table(cost: Totals) -> Table:
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
    return new_table(first, *columns, right=[column for column in columns if column != "kind"])
