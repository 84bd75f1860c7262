"""What augment did, as a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

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


@dataclass(frozen=True, repr=False)
class Report:
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
            sizes = ("{} x {}".format(*size) for size in (row.size, row.attention_size))
            channels = (str(number) for number in (row.num_heads, row.key_channels, row.value_channels))
            yield (row.name, *sizes, *channels, f"{row.parameters_before:,}", f"{row.parameters_after:,}")
        yield ("in all", "", "", "", "", "", f"{self.parameters_before:,}", f"{self.parameters_after:,}")

    def __str__(self) -> str:
        rows = list(self._rows())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *numbers in rows:
            right = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join((name.ljust(widths[0]), *right)).rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        head, *rows = self._rows()

        def cells(row: tuple[str, ...], tag: str) -> str:
            return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)

        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
