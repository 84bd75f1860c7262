"""Where results go: a table, and JSON that is whole after every row."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..utils.environment import environment
from ..utils.files import check_writable, replacing
from ..utils.terminal import console, new_table


class Progress:
    """Lines on stderr with the seconds since the start, so that stdout holds the results alone."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)


def write_json(result: Any, path: str | Path) -> None:
    """Into the file, whole or not at all; "-" is stdout."""
    text = json.dumps(result, indent=2)
    if str(path) == "-":
        print(text)
        return
    with replacing(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


class Results:
    """The rows of one benchmark, in a file after every change if there is to be one."""

    def __init__(self, benchmark: str, device: torch.device, json_to: str | None, **settings: Any) -> None:
        self.head: dict[str, Any] = {"benchmark": benchmark, "environment": environment(device), "settings": settings}
        self.rows: list[dict[str, Any]] = []
        self.json_to = json_to
        if json_to not in (None, "-"):
            # A path that cannot be written is found out now, not after the measurements; old results stay till then.
            check_writable(json_to)

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows += rows
        self.save()

    def replace(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.save()

    def save(self) -> None:
        if self.json_to not in (None, "-"):
            write_json(self.content(), self.json_to)

    def content(self) -> Any:
        return {**self.head, "rows": self.rows}

    def finish(self, columns: Sequence[str], cells: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
        """Print the table, or the JSON where it is to go to stdout."""
        if self.json_to == "-":
            write_json(self.content(), "-")
            return
        output = console()
        table = new_table(*columns, right=columns[2:])
        for row in cells:
            table.add_row(*row)
        output.print(table, highlight=False)
        known = self.head["environment"]
        versions = ", ".join(f"{name} {known[name]}" for name in ("aaconv", "torch", "triton") if known[name])
        commit = f" ({known['commit']})" if known["commit"] else ""
        for line in (*notes, f"{known['device']}, {versions}{commit}"):
            output.print(line, highlight=False, markup=False, soft_wrap=True)
        if self.json_to:
            output.print(f"written to {self.json_to}", highlight=False, markup=False, soft_wrap=True)


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
