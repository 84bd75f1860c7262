"""Files of weights: nothing in them runs, and what is wrong is one line without torch's advice."""

import os
import pickle

import pytest
import torch

from aaconv.utils.errors import one_line
from aaconv.utils.weights import read_weights


class Evil:
    def __reduce__(self):
        return os.system, ("touch evidence",)


def write(path, kind):
    tensors = {"a": torch.ones(3)}
    torch.save(tensors, path)
    data = path.read_bytes()
    if kind == "evil":
        torch.save(tensors | {"b": Evil()}, path)
    elif kind == "module":
        torch.save(torch.nn.Linear(2, 2), path)
    elif kind == "half":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "numbered":
        torch.save({1: torch.ones(3)}, path)
    elif kind == "meta":
        torch.save({"a": torch.ones(3, device="meta")}, path)
    else:
        path.write_bytes({"empty": b"", "text": b"junk" * 30, "photo": b"\xff\xd8\xff\xe0 a photo"}[kind])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("evil", "it holds posix.system, not only tensors"),
        ("module", "it holds torch.nn.modules.linear.Linear, not only tensors"),
        ("half", "PytorchStreamReader failed"),
        ("pickle", "it is not a file of tensors that torch has written"),
        ("photo", "it is not a file of tensors that torch has written"),
        ("empty", "it is not a file that torch has written"),
        ("text", "it is not a file that torch has written"),
        ("numbered", "holds no weights by name"),
        ("meta", "holds no numbers for a: it was saved from the meta device"),
    ],
)
def test_what_is_wrong_is_said_without_advice(kind, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.pt"
    write(path, kind)
    with pytest.raises(ValueError, match=r"weights\.pt") as error:
        read_weights(path)
    text = str(error.value)
    assert reason in text
    assert "weights_only" not in text
    assert "\x1b" not in text
    assert "\n" not in text
    assert not (tmp_path / "evidence").exists()


def test_one_line_is_the_first_that_says_something():
    assert one_line(RuntimeError("\n\n  \x1b[1mshapes differ\x1b[0m  \nTraceback ...")) == "shapes differ"
    assert one_line(KeyError("momentum")) == "KeyError 'momentum'"
    assert one_line(ValueError()) == "ValueError"
    assert "weights_only" not in one_line(RuntimeError("set weights_only to False"))
