"""JSON as it comes from disk: whatever is wrong with it is a ValueError that names the file."""

import json
import re
from pathlib import Path
from typing import Any

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file."""
    return parse_json(Path(path).read_bytes(), path)


def parse_json(data: bytes, name: str | Path) -> Any:
    """The value of a JSON text, which is called `name` in errors."""
    try:
        found = json.loads(data)
        return _whole_letters(found) if _SURROGATE.search(data) else found
    except RecursionError:
        raise ValueError(f"{name} is not opened: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _whole_letters(value: Any) -> Any:
    """With a question mark for each half of a surrogate pair: nothing can write or draw those."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_letters(part) for part in value]
    if isinstance(value, dict):
        return {_whole_letters(key): _whole_letters(part) for key, part in value.items()}
    return value
