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
_told_resizes: set[str] = set()


@dataclass(frozen=True)
class TableSpec:
    """What the tables of a layer are: which ("rel_h", "rel_w"), for how many heads (None: all share one), and how their
    numbers are drawn."""

    names: tuple[str, ...]
    depth: int
    heads: int | None
    mean: float
    std: float
    steps: tuple[int, ...] = ()
    """Of tables for a window, which are the same whatever the map: pixels from one distance of each to the next, the
    window's dilation."""

    @property
    def of_window(self) -> bool:
        return bool(self.steps)

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
            self.register_buffer(WINDOW_MARK, _mark(spec, factory.get("device")))
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


def _mark(spec: TableSpec, device: Any) -> Tensor:
    """What a checkpoint of a window has besides: the steps of its tables. Whole numbers, as batch norm's counter is:
    averages of weights can take them in."""
    return torch.tensor(spec.steps, dtype=torch.long, device=device)


def _fit_on_load(
    module: RelativeTables, state_dict: dict[str, Any], prefix: str, _: Any, strict: bool, *problems: list[str]
) -> None:
    """Before a state dict is loaded: fit its tables to those of the module. problems: lists of missing and unexpected
    keys, and of other errors, that torch tells in the end."""
    spec, mark = module.table_spec, state_dict.pop(prefix + WINDOW_MARK, None)
    old_steps = _steps_of(mark, spec)
    for name, old_step, step in zip(spec.names, old_steps, spec.steps or (1,) * len(spec.names), strict=True):
        own, key = getattr(module, name), prefix + name
        loaded = state_dict.get(key)
        if mark is not None and is_lazy(own) and loaded is not None and not is_lazy(loaded):
            problems[-1].append(f"{key} is of a window, this layer attends to maps of no size yet; pass size=")
            state_dict[key] = own  # else torch would give it the other's shape, and the next load would pass
        if is_lazy(own) or loaded is None or is_lazy(loaded) or loaded.dim() != own.dim():
            continue
        old, new = (loaded.shape[-2] + 1) // 2, (own.shape[-2] + 1) // 2
        if (old, old_step) == (new, step):
            continue
        if mark is None and not spec.of_window:
            state_dict[key] = fit_table(loaded, new)
        else:
            state_dict[key] = fit_window_table(loaded, new, step / old_step)
        before, now = _about(old, old_step, mark is not None), _about(new, step, spec.of_window)
        if (told := f"relative tables for {before} fitted to {now}") not in _told_resizes:
            _told_resizes.add(told)
            _log.warning("%s (first: %s)", told, key)
    if spec.of_window:
        beside = state_dict.get(prefix + spec.names[-1], getattr(module, WINDOW_MARK))
        state_dict[prefix + WINDOW_MARK] = _mark(spec, beside.device)


def _steps_of(mark: Tensor | None, spec: TableSpec) -> tuple[int, ...]:
    """Those of the tables that are loaded: 1 for a map's; where a mark does not say, the module's own."""
    if mark is None:
        return (1,) * len(spec.names)
    own = spec.steps or (1,) * len(spec.names)
    if type(mark) is not Tensor or mark.is_meta or mark.shape != (len(own),):  # nor may a subclass have numbers
        return own
    steps = tuple(mark.tolist())
    return steps if min(steps) >= 1 else own


def _about(length: int, step: int, of_window: bool) -> str:
    what = "windows" if of_window else "maps"
    return f"{what} of {length} pixels{f', dilation {step}' if step != 1 else ''}"


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


def fit_window_table(table: Tensor, length: int, step: float = 1) -> Tensor:
    """A window's table for another window, or from and to that of a map: distances stay what they are. Those farther
    than the table knows have its farthest vectors, those between two of its distances lie between their vectors.

    step: how many of the table's distances are one of the new table's.
    """
    longest, exact = (table.shape[-2] + 1) // 2, torch.promote_types(table.dtype, torch.float32)
    place = (torch.arange(2 * length - 1, device=table.device, dtype=torch.float64) - (length - 1)) * step
    place = place.clamp(1 - longest, longest - 1) + longest - 1
    below = place.long()
    above = (below + 1).clamp(max=2 * longest - 2)
    part = (place - below).to(exact)[:, None]
    return torch.lerp(table[..., below, :].to(exact), table[..., above, :].to(exact), part).to(table.dtype)


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
