"""What accelerate did, as a table, and the way back."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .accelerated import Accelerated
from .report_table import TableReport


@dataclass(frozen=True)
class Replaced:
    """One attention module that is computed by ours; notes: when its own forward runs all the same."""

    name: str
    module: nn.Module
    accelerated: Accelerated

    @property
    def notes(self) -> list[str]:
        return self.accelerated.notes()


@dataclass(frozen=True)
class Kept:
    """One attention module that stays as it is, and why."""

    name: str
    module: nn.Module
    reason: str


@dataclass(frozen=True, repr=False)
class Report(TableReport):
    """What accelerate replaced and what it did not; it prints as a table."""

    replaced: tuple[Replaced, ...]
    kept: tuple[Kept, ...]

    left = frozenset({0, 1, 5, 6})

    def undo(self) -> None:
        """Give every module its own forward back."""
        for row in self.replaced:
            there = vars(row.module).get("forward")
            if there is not None and not isinstance(there, Accelerated):
                raise ValueError(
                    f"the forward of {row.name} has been replaced since accelerate, by {there!r}; undo that first"
                )
        for row in self.replaced:
            if "forward" in vars(row.module):
                del row.module.forward

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield ("module", "class", "heads", "depth", "tables", "computed by", "notes")
        for row in self.replaced:
            attention = row.accelerated
            tables = " x ".join(str((table.shape[0] + 1) // 2) for table in attention.tables())
            sizes = str(attention.num_heads), str(attention.depth), tables
            yield (row.name, type(row.module).__name__, *sizes, attention.operator, "; ".join(row.notes))
        for kept in self.kept:
            yield (kept.name, type(kept.module).__name__, "", "", "", "its own forward", kept.reason)
        yield ("in all", "", "", "", "", f"{len(self.replaced)} of {len(self.replaced) + len(self.kept)}", "")
