"""A file is there whole or not at all, and what keeps it from being written is one line with a way out."""

import errno
import os
import pickle

import pytest

from aaconv.utils.files import Unwritable, check_writable, remove_stale_drafts, replacing, resolved


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old.txt"
    path.write_text("old")
    return path


def refused(number):
    """As a file that is open refuses to be written: without its name."""
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "No space left on device; make room there or choose another place"),
        (errno.EDQUOT, "Disk quota exceeded; make room there or choose another place"),
        (errno.EIO, "Input/output error; choose another place"),
    ],
)
def test_what_goes_wrong_in_the_middle_leaves_the_old_file(number, told, old):
    def write():
        with replacing(old) as draft:
            draft.write_text("half of")
            raise refused(number)

    with pytest.raises(Unwritable) as caught:
        write()
    assert str(caught.value) == f"{old} cannot be written: {told}"
    assert (caught.value.errno, caught.value.strerror) == (number, os.strerror(number))
    assert [path.read_text() for path in old.parent.iterdir()] == ["old"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as it travels between processes


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("/proc/x.txt", "/proc/x.txt cannot be written: /proc is not writable; choose another place"),
        ("link.txt", "link.txt cannot be written: {here}/none is gone; choose another place"),
        (f"{'x' * 300}.txt", "x.txt cannot be written: File name too long; choose another place"),
        ("old.txt/x.txt", "old.txt is a file, not a folder to write x.txt in; choose another"),
        ("none/x.txt", "there is no folder none to write x.txt in; make it first"),
        (".", ". is a folder, not a file to write"),
    ],
)
def test_places_that_take_no_file_are_named(place, told, old, monkeypatch):
    monkeypatch.chdir(old.parent)
    os.symlink("none/x.txt", "link.txt")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        check_writable(place)
    assert str(caught.value).endswith(told.format(here=old.parent))
    assert sorted(os.listdir()) == ["link.txt", "old.txt"]


def test_a_device_is_written_to_and_named_as_well():
    with pytest.raises(Unwritable, match="/dev/full cannot be written: No space left"), replacing("/dev/full") as path:
        path.write_text("much")
    with replacing("/dev/null") as path:
        path.write_text("anything")


def test_other_files_that_fail_meanwhile_keep_their_names(old):
    with pytest.raises(FileNotFoundError, match=r"none\.jpg"), replacing(old):
        (old.parent / "none.jpg").read_bytes()
    inner = old.with_suffix(".json")
    with pytest.raises(Unwritable, match=r"old\.json cannot be written"), replacing(old), replacing(inner):
        raise refused(errno.ENOSPC)


def test_a_closed_pipe_is_no_error_of_a_file(old):
    with pytest.raises(BrokenPipeError), replacing(old):
        raise refused(errno.EPIPE)


def test_links_that_lead_round_in_a_circle_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop.txt", "loop.txt")
    os.symlink("there", "here")
    os.symlink("here", "there")
    for place in ("loop.txt", "here/x.txt"):
        with pytest.raises(OSError, match=r"x\.txt|loop\.txt"):
            check_writable(place)
        with pytest.raises(OSError, match=place) as caught:
            resolved(place)
        assert caught.value.errno == errno.ELOOP


def test_a_draft_cannot_be_guessed(old, monkeypatch):
    with replacing(old) as draft, replacing(old) as other:
        assert draft.name != other.name
        assert draft.parent == old.parent
        assert draft.name.startswith(f".old.{os.getpid()}-")
        draft.write_text("new")
        other.write_text("newer")
    assert old.read_text() == "new"


def test_drafts_of_processes_that_are_gone_are_removed(tmp_path):
    gone = 2**22 + 1  # beyond the largest number of a process
    stale = [f".metrics.{gone}-0123456789abcdef.csv", f".metrics.{gone}.csv", f".model-best.{gone}.safetensors"]
    kept = [
        f".metrics.{os.getpid()}-0123456789abcdef.csv",
        ".metrics.1-0123456789abcdef.csv",
        f".other.{gone}-0123456789abcdef.csv",
        f".metrics.{gone}-x.csv",
        f"metrics.{gone}.csv",
        "metrics.csv",
    ]
    for name in (*stale, *kept):
        (tmp_path / name).touch()
    remove_stale_drafts(tmp_path, ["metrics.csv", "model-best.safetensors"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
