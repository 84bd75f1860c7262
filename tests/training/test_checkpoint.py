"""Checkpoints: whole or not at all, checked when they are read, and nothing in them runs."""

import hashlib
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from aaconv.training import checkpoint
from aaconv.training.checkpoint import last_good, load, load_newest, paths, save
from aaconv.utils.weights import decode, encode, read_weights

STATE = {"epoch": 3, "rows": [{"loss": 0.1 + 0.2}], "none": None}


def tensors(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(3, 5, 2, 2, generator=random), "count": torch.tensor(7)},
        "optimizer": {},
        "other": {"half": torch.randn(4, generator=random).bfloat16(), "bytes": torch.arange(9, dtype=torch.uint8)},
    }


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_what_was_saved_is_loaded(tmp_path):
    path = save(tmp_path / "checkpoints", 12, STATE, tensors(), keep=3)
    assert path == tmp_path / "checkpoints/step-00000012"
    found = load(path)
    assert found.state == STATE
    assert all(same(found.tensors[name], some) for name, some in tensors().items())


def test_memory_layout_does_not_change_the_file():
    weight = torch.randn(3, 5, 2, 2)
    assert encode({"w": weight}) == encode({"w": weight.to(memory_format=torch.channels_last)})


def test_all_of_it_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done, replace = [], os.replace

    def record_sync(file):
        found = os.fstat(file)
        done.append((found.st_ino, found.st_size))

    def record_replace(source, target):
        done.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    path = save(tmp_path, 12, STATE, tensors(), keep=3)
    place = done.index("renamed")
    files = {(file.stat().st_ino, file.stat().st_size) for file in path.iterdir()}
    assert len(files) == 5
    assert set(done[: place - 1]) == files
    assert done[place - 1][0] == path.stat().st_ino, "the folder with their names"
    assert [inode for inode, _ in done[place + 1 :]] == [tmp_path.stat().st_ino], "the one with its new name"


def test_the_newest_is_loaded_and_named(tmp_path):
    for step in (1, 20, 3):
        save(tmp_path, step, {"step": step}, tensors(), keep=9)
    assert load_newest(tmp_path, pytest.fail).state == {"step": 20}
    assert last_good(tmp_path) == f"the last good checkpoint is {tmp_path / 'step-00000020'}"
    assert last_good(tmp_path / "none", "finite") == "there is no checkpoint yet"


def test_later_ones_stay_when_an_earlier_one_is_saved(tmp_path):
    """They may be what is damaged."""
    for step in (1, 2, 9, 3):
        save(tmp_path, step, STATE, tensors(), keep=2)
    assert [path.name for path in paths(tmp_path)] == [f"step-0000000{step}" for step in (2, 3, 9)]


def test_the_newest_are_kept(tmp_path):
    for step in (1, 20, 3, 100):
        save(tmp_path, step, STATE, tensors(step), keep=2)
    assert [path.name for path in paths(tmp_path)] == ["step-00000020", "step-00000100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 5, STATE, tensors(0), keep=1)
    save(tmp_path, 5, {"epoch": 4}, tensors(1), keep=1)
    found = load_newest(tmp_path, print)
    assert found.state == {"epoch": 4}
    assert same(found.tensors["model"], tensors(1)["model"])


def test_one_that_was_moved_aside_for_a_new_one_comes_back(tmp_path):
    path = save(tmp_path, 5, STATE, tensors(), keep=1)
    path.rename(tmp_path / ".old-step-00000005")
    assert load_newest(tmp_path, print).state == STATE
    assert paths(tmp_path) == [path]
    for step in (3, 7):
        save(tmp_path, step, {"step": step}, tensors(), keep=3)
    path.rename(tmp_path / ".old-step-00000005")
    assert load_newest(tmp_path, print).state == {"step": 7}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000007"], (
        "a pruned one does not"
    )


def test_one_that_was_moved_aside_goes_when_the_new_one_is_there(tmp_path):
    path = save(tmp_path, 5, {"epoch": 4}, tensors(), keep=1)
    shutil.copytree(path, tmp_path / ".old-step-00000005")
    assert load_newest(tmp_path, pytest.fail).state == {"epoch": 4}
    assert list(tmp_path.iterdir()) == [path]


def test_no_folder_no_checkpoint(tmp_path):
    assert load_newest(tmp_path / "none", print) is None
    assert paths(tmp_path / "none") == []


def test_an_error_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    save(tmp_path, 5, STATE, tensors(), keep=1)

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 6, STATE, tensors(), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert load(tmp_path / "step-00000005").state == STATE


class Bomb:
    """A pickle of it writes a file where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "the code ran")


def harmful(path, kind):
    """The bytes of a file of weights with code in it: a bare pickle, or torch's archive."""
    content = pickle.dumps({"weight": Bomb(path)}, protocol=2)
    if kind == "pickle":
        return content
    archive = path.with_name("archive")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return archive.read_bytes()


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("ending", [".safetensors", ".pt", ".pth", ".bin"])
def test_weights_with_code_in_them_are_refused(ending, kind, tmp_path):
    path, bomb = tmp_path / f"model{ending}", tmp_path / "bomb"
    path.write_bytes(harmful(bomb, kind))
    with pytest.raises(ValueError, match="is not opened"):
        read_weights(path)
    assert not bomb.exists()
    # The bomb is a real one: without the guard it goes off.
    if kind == "pickle":
        pickle.loads(path.read_bytes())
        assert bomb.read_text() == "the code ran"


def test_a_checkpoint_with_code_in_it_is_refused_even_if_its_sums_are_right(tmp_path):
    path, bomb = save(tmp_path, 5, STATE, tensors(), keep=1), tmp_path / "bomb"
    content = harmful(bomb, "pickle")
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["model.safetensors"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="not a safetensors file"):
        load(path)
    assert not bomb.exists()


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    path = save(tmp_path / "checkpoints", 5, STATE, tensors(), keep=1)
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(encode({"x": torch.ones(1)}))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["../../secret.safetensors"] = hashlib.sha256(secret.read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="is damaged"):
        load(path)


def test_a_checkpoint_without_its_state_is_refused(tmp_path):
    path = save(tmp_path, 5, STATE, tensors(), keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"^state\.json is missing$"):
        load(path)


def test_weights_of_torch_are_read_without_code(tmp_path):
    weights = tensors()["model"]
    older = tensors(1)["model"]
    for content in (
        weights,
        {"state_dict": weights, "epoch": 3},
        {"state_dict": older, "state_dict_ema": weights, "epoch": 3},
        {"model": weights, "optimizer": {}},
        {"state_dict": {"model": weights}},
    ):
        torch.save(content, tmp_path / "weights.pt")
        assert same(read_weights(tmp_path / "weights.pt"), weights)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="no weights by name"):
        read_weights(tmp_path / "list.pt")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, encode({"x": torch.ones(3)})[:-1]])
def test_what_is_no_safetensors_file_is_named(content):
    with pytest.raises(ValueError, match="some file is not a safetensors file"):
        decode(content, "some file")


def test_one_that_the_disk_does_not_give_is_reported_and_the_one_before_is_used(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, STATE, tensors(step), keep=3)
    broken = tmp_path / "step-00000002/model.safetensors"
    broken.unlink()
    broken.mkdir()
    said = []
    assert load_newest(tmp_path, said.append).path.name == "step-00000001"
    assert said == [f"checkpoint {broken.parent} cannot be used: {broken.name} cannot be read: Is a directory; "
                    "trying the one before"]  # fmt: skip


def test_a_file_of_something_else_is_refused_in_words(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="not a file that torch has written"):
        read_weights(tmp_path / "notes.txt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_weights(tmp_path / "none.safetensors")
