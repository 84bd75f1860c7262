"""Examples in the docstrings of public names say the truth, and the names of `import aaconv` have one."""

import doctest
import sys
from importlib import import_module

import pytest
import torch

import aaconv
from aaconv import attention

OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def public_names():
    """(name, object) of what the package and its rooms offer."""
    for name in aaconv.__all__:
        if name in aaconv._ROOMS:
            room = import_module(f"aaconv.{name}")
            offered = [one for one in getattr(room, "__all__", ()) if one not in aaconv.__all__]
            yield from ((f"{name}.{one}", getattr(room, one)) for one in offered)
        elif name != "__version__":
            yield name, getattr(aaconv, name)


def examples(name, value):
    """What is written beneath it, with the names of its own module."""
    scope = vars(sys.modules[value.__module__]) if hasattr(value, "__module__") else {}
    return doctest.DocTestFinder(recurse=False).find(value, name, globs={"torch": torch, **scope})


WITH_EXAMPLES = {name: value for name, value in public_names() if ">>> " in (getattr(value, "__doc__", None) or "")}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_public_name_say_the_truth(name, monkeypatch):
    monkeypatch.setattr(attention, "_default_backend", None)
    torch.manual_seed(0)
    found = doctest.DocTestRunner(optionflags=OPTIONS)
    said = []
    for test in examples(name, WITH_EXAMPLES[name]):
        found.run(test, out=said.append)
    assert found.tries > 0
    assert not said, "".join(said)


def test_everything_at_the_front_door_has_an_example():
    assert {name for name in aaconv.__all__ if name not in (*aaconv._ROOMS, "__version__")} <= WITH_EXAMPLES.keys()
