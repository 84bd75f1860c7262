"""Relative tables: learned vectors for the distances of rows and of columns. Made, drawn, fitted to any map, loaded."""

import logging
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .lazy import UninitializedTable
from .tracing import is_exporting

WINDOW_MARK = "tables_of_window"
_log = logging.getLogger("aaconv")
_told_resizes: set[tuple[str, int, int]] = set()


@dataclass(frozen=True)
class TableSpec:
    """What the tables of a layer are: which ("rel_h", "rel_w"), for how many heads (None: all share one), and how their
    numbers are drawn."""

    names: tuple[str, ...]
    depth: int
    heads: int | None
    mean: float
    std: float
    of_window: bool = False
    """Made for a window, which is the same whatever the map."""

    def shape(self, length: int) -> tuple[int, ...]:
        """Of the table for an axis of so many pixels."""
        shape = (2 * length - 1, self.depth)
        return shape if self.heads is None else (self.heads, *shape)


class RelativeTables(nn.Module):
    """A module with relative tables: `rel_h` [2*height - 1, depth], whose index 0 is the offset -(height - 1), and
    `rel_w` [2*width - 1, depth], or one such per head, [heads, 2*height - 1, depth]. None where it has none.

    A checkpoint made for maps of another size is fitted as it is loaded.
    """

    rel_h: nn.Parameter | None
    rel_w: nn.Parameter | None
    table_spec: TableSpec

    def add_tables(self, spec: TableSpec, size: tuple[int, int] | None, **factory: Any) -> None:
        """Register the tables, drawn for maps of `size` (height, width); without one they are left uninitialized."""
        self.table_spec = spec
        self.register_parameter("rel_h", None)
        self.register_parameter("rel_w", None)
        for name in spec.names:
            self.register_parameter(name, UninitializedTable(**factory))  # type: ignore[arg-type]
        if spec.names:
            self.register_load_state_dict_pre_hook(_fit_on_load)
        if spec.names and spec.of_window:
            # Tells a checkpoint of a window from one of a smaller map, whose distances mean something else.
            # A whole number, as batch norm's counter is: averages of weights can take it in.
            self.register_buffer(WINDOW_MARK, torch.ones((), dtype=torch.long, device=factory.get("device")))
        if size is not None:
            self.materialize_tables(size)

    def materialize_tables(self, size: tuple[int, int]) -> None:
        """Give uninitialized tables the shape for maps of `size`, and draw them."""
        # Never inference tensors: autograd refuses to save those for a backward.
        with torch.inference_mode(False), torch.no_grad():
            for table, length in zip((self.rel_h, self.rel_w), size, strict=True):
                if table is not None:
                    table.materialize(self.table_spec.shape(length))  # type: ignore[attr-defined]
            self.draw_tables()

    def draw_tables(self) -> None:
        """Draw the tables that have a shape anew."""
        for table in (self.rel_h, self.rel_w):
            if table is not None and not is_lazy(table):
                nn.init.normal_(table, self.table_spec.mean, self.table_spec.std)

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) the relative tables are made for; None without tables or before the first forward."""
        if self.rel_w is None or is_lazy(self.rel_w):
            return None
        height = 1 if self.rel_h is None else (self.rel_h.shape[-2] + 1) // 2
        return height, (self.rel_w.shape[-2] + 1) // 2

    def fitted_tables(self, height: int, width: int) -> tuple[Tensor | None, Tensor | None]:
        """(rel_h, rel_w) for a map of height x width, as attend_2d takes them."""
        rel_h, rel_w = self.rel_h, self.rel_w
        if rel_w is None:
            return None, None
        if self.table_spec.of_window:
            return self._with_rows(rel_h, rel_w)
        return self._with_rows(None if rel_h is None else fit_table(rel_h, height), fit_table(rel_w, width))

    @staticmethod
    def _with_rows(rel_h: Tensor | None, rel_w: Tensor) -> tuple[Tensor, Tensor]:
        if rel_h is None:
            # One row: its logit is the same for every key, so the softmax does not see it.
            return rel_w.new_zeros(*rel_w.shape[:-2], 1, rel_w.shape[-1]), rel_w
        return rel_h, rel_w


def _fit_on_load(
    module: RelativeTables, state_dict: dict[str, Any], prefix: str, _: Any, strict: bool, *problems: list[str]
) -> None:
    """Before a state dict is loaded: fit its tables to those of the module. problems: lists of missing and unexpected
    keys, and of other errors, that torch tells in the end."""
    of_window = state_dict.pop(prefix + WINDOW_MARK, None) is not None
    if module.table_spec.of_window:
        state_dict[prefix + WINDOW_MARK] = getattr(module, WINDOW_MARK)
    for name in module.table_spec.names:
        own, key = getattr(module, name), prefix + name
        loaded = state_dict.get(key)
        if of_window and is_lazy(own) and loaded is not None and not is_lazy(loaded):
            problems[-1].append(f"{key} is of a window, this layer attends to maps of no size yet; pass size=")
        if is_lazy(own) or loaded is None or is_lazy(loaded) or loaded.dim() != own.dim():
            continue
        old, new = (loaded.shape[-2] + 1) // 2, (own.shape[-2] + 1) // 2
        if old != new:
            if of_window or module.table_spec.of_window:
                fitted, told = extend_table(loaded, new), "relative tables for windows of %d pixels fitted to %d"
            else:
                fitted, told = fit_table(loaded, new), "relative tables for maps of %d pixels resized to %d"
            state_dict[key] = fitted
            if (told, old, new) not in _told_resizes:
                _told_resizes.add((told, old, new))
                _log.warning(f"{told} (first: %s)", old, new, key)


def fit_table(table: Tensor, length: int) -> Tensor:
    """A relative table for a map of another length: [..., 2*S - 1, depth] -> [..., 2*length - 1, depth].

    A smaller map uses the middle of the table, exactly: its distances are among those the table knows. A larger one
    stretches the table by cubic interpolation, the farthest distance on the farthest.
    """
    longest = (table.shape[-2] + 1) // 2
    if not torch.compiler.is_compiling() and length == longest:
        return table
    # Under torch.export the length may be symbolic, and a branch on it would pin it to one side.
    if not is_exporting() and length <= longest:
        return table.narrow(-2, longest - length, 2 * length - 1)
    return _interpolate(table, longest, length)


def extend_table(table: Tensor, length: int) -> Tensor:
    """A window's table for another window, or from and to that of a map: distances stay what they are. A larger one
    repeats the farthest vectors that the table knows."""
    longest = (table.shape[-2] + 1) // 2
    place = torch.arange(2 * length - 1, device=table.device) - (length - 1)
    return table[..., place.clamp(1 - longest, longest - 1) + longest - 1, :]


def _interpolate(table: Tensor, longest: int, length: int) -> Tensor:
    """Cubic convolution (Keys, a = -1/2) at the stretched offsets; at whole offsets it is the table, bit for bit."""
    exact = torch.promote_types(table.dtype, torch.float32)
    offset = torch.arange(2 * length - 1, device=table.device, dtype=exact) - (length - 1)
    # One expression for both sides, so that it holds for a symbolic length: (S - 1) / (length - 1), at most 1.
    stretch = ((longest - 1) / offset[-1:].clamp(min=1)).clamp(max=1)
    place = offset * stretch + (longest - 1)
    left = place.floor()
    t = (place - left)[:, None]
    weights = (
        ((-0.5 * t + 1.0) * t - 0.5) * t,
        ((1.5 * t - 2.5) * t) * t + 1.0,
        ((-1.5 * t + 2.0) * t + 0.5) * t,
        ((0.5 * t - 0.5) * t) * t,
    )
    last = 2 * longest - 2
    taps = ((left.long() + step).clamp(0, last) for step in (-1, 0, 1, 2))
    fitted = sum(weight * table[..., tap, :].to(exact) for weight, tap in zip(weights, taps, strict=True))
    return cast(Tensor, fitted).to(table.dtype)
