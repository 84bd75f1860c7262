"""A file is there whole or not at all, and what keeps it from being written is one line with a way out."""

import errno
import os
import pickle

import pytest

from aaconv.utils.files import Unwritable, check_writable, replacing


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
