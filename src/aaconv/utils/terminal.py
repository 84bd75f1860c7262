"""How this package writes to a terminal."""

import os
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, TypeVar

from rich.console import Console
from rich.table import Table

QUIET = 10.0  # seconds after which one wants to know whether something still happens
Batch = TypeVar("Batch", bound=tuple)


def console() -> Console:
    """Rich output, plain where it is not a terminal, and always wide enough that no digit is cut."""
    terminal = Console()
    return Console(width=max(terminal.width, 120) if terminal.is_terminal else 200)


def fitting_console() -> Console:
    """As wide as the terminal, or as $COLUMNS says; 200 columns elsewhere."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=200)


def new_table(*columns: str, right: Collection[str] = (), fold: bool = False, header: bool = True) -> Table:
    """A table in the style of all: no lines, bold headers, the columns in `right` flush right; fold: cells may wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=header)
    for column in columns:
        side: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=side, no_wrap=not fold, overflow="fold" if fold else "ellipsis")
    return table


def plural(number: int, word: str) -> str:
    """1 image, 2 images, 1,000 images."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def readable_bytes(size: int) -> str:
    """1.50 MiB, and so on."""
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def counted(batches: Iterable[Batch], images: int) -> Iterator[Batch]:
    """The batches, (images, ...) each; what takes long says now and then on stderr how far it has come."""
    output, done, reported = Console(stderr=True), 0, time.monotonic()
    for batch in batches:
        yield batch
        done += len(batch[0])
        if time.monotonic() - reported > QUIET:
            output.print(f"{done:,} of {images:,} images", highlight=False)
            reported = time.monotonic()
