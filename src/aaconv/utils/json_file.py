"""JSON as it comes from disk: whatever is wrong with it is a ValueError that names the file."""

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

DEEPEST = 100
"""Levels of lists and mappings: nobody writes more, and what walks through them calls itself for each."""

_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file."""
    return parse_json(Path(path).read_bytes(), path)


def parse_json(data: bytes, name: str | Path) -> Any:
    """The value of a JSON text, which is called `name` in errors."""
    # Brackets in texts count at first: they are rarely so many, and to leave them out takes long in a large file.
    if _depth(data) > DEEPEST and _depth(_TEXT.sub(b"", data)) > DEEPEST:
        raise ValueError(f"{name} is not opened: its JSON is nested too deeply, more than {DEEPEST} levels")
    try:
        found = json.loads(data)
        return _whole_letters(found) if _SURROGATE.search(data) else found
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _depth(data: bytes) -> int:
    """How many brackets are open at most."""
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in data.translate(None, _NO_BRACKETS)), default=0)


def _whole_letters(value: Any) -> Any:
    """With a question mark for each half of a surrogate pair: nothing can write or draw those."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_letters(part) for part in value]
    if isinstance(value, dict):
        return {_whole_letters(key): _whole_letters(part) for key, part in value.items()}
    return value
