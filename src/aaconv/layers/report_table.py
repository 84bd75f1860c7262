"""Reports that print as a table, in a terminal and in a notebook."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from html import escape


class TableReport(ABC):
    """Something whose rows are a table: the first is the head. Columns in `left` are words, the others numbers."""

    left = frozenset({0})

    @abstractmethod
    def _rows(self) -> Iterator[tuple[str, ...]]:
        """The head, then the others."""

    def __str__(self) -> str:
        rows = list(self._rows())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(self._aligned, range(len(row)), row, widths)).rstrip() for row in rows)

    def _aligned(self, column: int, cell: str, width: int) -> str:
        return cell.ljust(width) if column in self.left else cell.rjust(width)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        head, *rows = self._rows()

        def cells(row: tuple[str, ...], tag: str) -> str:
            return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)

        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
