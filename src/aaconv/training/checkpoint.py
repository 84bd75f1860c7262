"""The state of a run on the disk: `checkpoints/step-00001200/`, whole or not at all, and checked before it is used.

A checkpoint is a folder of safetensors and JSON files with their sha256 sums in manifest.json. It is written under
another name and renamed when all of it has reached the disk. Nothing in it can run code.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.json_file import parse_json, read_json
from ..utils.weights import Tensors, decode, encode, write_file

MANIFEST, STATE = "manifest.json", "state.json"
DRAFT, OLD = ".draft-", ".old-"


@dataclass(frozen=True)
class Checkpoint:
    """`state` is what JSON holds, `tensors` those of each file by its name without the ending."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, Tensors]


def save(folder: Path, step: int, state: dict[str, Any], tensors: dict[str, Tensors], *, keep: int) -> Path:
    """Write folder/step-N and remove all but the newest `keep`; on an error what was there before still is."""
    target = folder / f"step-{step:08d}"
    draft = folder / f"{DRAFT}{target.name}"
    try:
        folder.mkdir(exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        files = {STATE: json.dumps(state).encode()}
        sums = {}
        for name, data in (*files.items(), *((f"{name}.safetensors", encode(some)) for name, some in tensors.items())):
            sums[name] = hashlib.sha256(data).hexdigest()
            write_file(draft / name, data)
        write_file(draft / MANIFEST, json.dumps({"step": step, "sha256": sums}, indent=2).encode())
        _sync_folder(draft)
        if target.exists():
            os.replace(target, _aside(target))
        os.replace(draft, target)
        _sync_folder(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    prune(folder, target, keep)
    return target


def prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but `newest` and the `keep` - 1 before it; later ones stay, they may be what is damaged."""
    older = [path for path in paths(folder) if path <= newest]
    for path in older[: max(0, len(older) - keep)]:
        os.replace(path, _aside(path))
    _tidy(folder)


def paths(folder: Path) -> list[Path]:
    """The checkpoints, oldest first; whether they are whole is not looked at."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name))


def last_good(folder: Path, word: str = "good") -> str:
    """For messages: where a run can be resumed from."""
    there = paths(folder)
    return f"the last {word} checkpoint is {there[-1]}" if there else "there is no checkpoint yet"


def load(path: Path) -> Checkpoint:
    """Read and compare every file with its sum; ValueError says what is wrong."""
    try:
        sums = read_json(path / MANIFEST)["sha256"]
        if any(name != Path(name).name for name in sums):
            raise ValueError  # a file somewhere else
        data = {name: (path / name).read_bytes() for name in sums}
    except FileNotFoundError as error:
        raise ValueError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise ValueError(f"{Path(error.filename or path).name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{MANIFEST} is damaged") from None
    for name, content in data.items():
        if hashlib.sha256(content).hexdigest() != sums[name]:
            raise ValueError(f"{name} is damaged")
    if STATE not in data:
        raise ValueError(f"{STATE} is missing")
    tensors = {name.removesuffix(".safetensors"): decode(some, name) for name, some in data.items() if name != STATE}
    state = parse_json(data[STATE], STATE)
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} is not what a run writes")
    return Checkpoint(path, state, tensors)


def load_newest(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; each damaged one is reported in one line. None: there has been none yet."""
    _restore(folder)
    _tidy(folder)
    found = paths(folder)
    for path in reversed(found):
        try:
            return load(path)
        except ValueError as error:
            say(f"checkpoint {path} cannot be used: {error}; trying the one before")
    if found:
        raise ValueError(
            f"none of the {len(found)} checkpoints in {folder} is whole; start again into another folder with "
            f"aaconv train --from {folder.parent / 'recipe.yaml'}"
        )
    return None


def _aside(path: Path) -> Path:
    aside = path.with_name(f"{OLD}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def _restore(folder: Path) -> None:
    """Put back what was moved aside for a new checkpoint of the same step that then was not finished."""
    newest = max((path.name for path in paths(folder)), default="")
    for path in folder.glob(f"{OLD}*"):
        name = path.name.removeprefix(OLD)
        if name > newest:
            os.replace(path, folder / name)


def _tidy(folder: Path) -> None:
    if folder.is_dir():
        for path in (*folder.glob(f"{DRAFT}*"), *folder.glob(f"{OLD}*")):
            shutil.rmtree(path, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
