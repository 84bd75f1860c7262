"""What augment did, as a table."""

from collections.abc import Iterator
from dataclasses import dataclass

from .report_table import TableReport

Size = tuple[int, int]


@dataclass(frozen=True)
class Replacement:
    """One convolution that became an AAConv2d."""

    name: str
    size: Size
    attention_size: Size
    num_heads: int
    key_channels: int
    value_channels: int
    parameters_before: int
    parameters_after: int
    window: Size | None = None
    """Keys that a query sees, rows and columns; None: the whole map."""


@dataclass(frozen=True, repr=False)
class Report(TableReport):
    """What augment did; it prints as a table."""

    replacements: tuple[Replacement, ...]

    @property
    def parameters_before(self) -> int:
        return sum(row.parameters_before for row in self.replacements)

    @property
    def parameters_after(self) -> int:
        return sum(row.parameters_after for row in self.replacements)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Names first, then numbers; the first row is the head, the last one the sum."""
        yield ("layer", "map", "attends at", "heads", "dk", "dv", "parameters", "augmented")
        for row in self.replacements:
            sizes = ["{} x {}".format(*size) for size in (row.size, row.attention_size)]
            if row.window is not None:
                sizes[1] += " in {} x {}".format(*row.window)
            channels = (str(number) for number in (row.num_heads, row.key_channels, row.value_channels))
            yield (row.name, *sizes, *channels, f"{row.parameters_before:,}", f"{row.parameters_after:,}")
        yield ("in all", "", "", "", "", "", f"{self.parameters_before:,}", f"{self.parameters_after:,}")
