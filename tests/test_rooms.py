"""The order of the rooms: each imports only rooms before it, imports inside functions included."""

from pathlib import Path

import pytest

from support.source_tree import PACKAGE, imported_modules

FRONT_DOOR = {"__init__", "__main__", "version", "demo"}
"""The only modules that lie flat in the package; they may import every room."""

MAY_IMPORT = {
    "utils": "",
    "attention": "",
    "layers": "utils attention",
    "data": "utils",
    "detection": "utils data",
    "models": "utils layers detection",
    "cost": "utils layers models",
    "recipes": "utils models",
    "tasks": "utils data detection models recipes",
    "runs": "utils layers data models cost recipes tasks",
    "training": "utils layers data models recipes tasks runs",
    "inference": "utils data detection models recipes tasks runs",
    "paper": "utils cost recipes runs",
    "explore": "utils attention layers data models runs inference",
    "export": "utils attention layers data detection models cost recipes tasks runs inference explore",
    "benchmark": "utils attention layers data models recipes tasks training",
    "cli": "utils attention layers data detection models cost recipes tasks runs training inference paper explore"
    " export benchmark demo",
}
"""Every room, in order, with the rooms it may import. `version` holds one string, which all may read."""


def wrong_imports(room: str, source: str, package: str) -> list[str]:
    """The imports of a file in the room that its order forbids."""
    allowed = {room, "version", *MAY_IMPORT[room].split()}
    ours = (name.split(".") for name in imported_modules(source, package) if name.split(".")[0] == "aaconv")
    return sorted(".".join(name) for name in ours if len(name) > 1 and name[1] not in allowed)


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    wrong = {}
    for file in files_of(room):
        package = ".".join(["aaconv", *file.relative_to(PACKAGE).parts[:-1]])
        if found := wrong_imports(room, file.read_text(encoding="utf-8"), package):
            wrong[str(file.relative_to(PACKAGE))] = found
    assert not wrong


def test_the_order_has_no_way_back():
    rooms = [*MAY_IMPORT]
    for place, (room, allowed) in enumerate(MAY_IMPORT.items()):
        assert set(allowed.split()) - FRONT_DOOR <= set(rooms[:place]), room


def test_nothing_but_the_front_door_lies_flat():
    assert {file.stem for file in PACKAGE.glob("*.py")} == FRONT_DOOR
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert rooms == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "planted",
    [
        "from ..training import trainer",
        "from aaconv.training.trainer import train",
        "import aaconv.training",
        "from .. import training",
        "def late():\n    from ..training.trainer import train",
    ],
)
def test_a_planted_import_is_seen(planted):
    assert wrong_imports("layers", planted, "aaconv.layers")
    assert not wrong_imports("cli", planted, "aaconv.cli")
