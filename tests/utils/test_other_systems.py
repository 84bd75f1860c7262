"""What other systems lack has another way there: Windows' modules and constants, played here by POSIX's."""

import os

import pytest
import torch
from PIL import Image

from aaconv.data import shapes
from aaconv.data.images import open_regular
from aaconv.training import checkpoint
from aaconv.utils import files
from support.fresh import run_fresh
from support.source_tree import imported_modules, modules, package_of

POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
MAY_ASK_THE_SYSTEM = {"aaconv.utils.locks", "aaconv.utils.memory"}
AS_ON_WINDOWS = """
import fcntl, os, sys, types

def locking(file, how, length):
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if how == "wait" else fcntl.LOCK_NB), length, 0, os.SEEK_CUR)
    except OSError:
        raise PermissionError(13, "Permission denied") from None

import torch  # as it is here
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK="now", LK_LOCK="wait")
real, sys.platform = sys.platform, "win32"
del sys.modules["fcntl"]
from aaconv.utils import locks, memory
assert "fcntl" not in sys.modules
sys.platform = real
"""


def test_only_two_files_import_what_windows_lacks():
    for name, path in modules().items():
        found = imported_modules(path.read_text(encoding="utf-8"), package_of(name, path)) & POSIX_ONLY
        assert not found or name in MAY_ASK_THE_SYSTEM, f"{name} imports {found}"


@pytest.mark.processes
def test_a_run_is_locked_on_windows_too(tmp_path):
    """A second process is refused, and reads who has the lock; it gets it when the first one is gone."""
    program = f"""{AS_ON_WINDOWS}
from pathlib import Path
from aaconv.training.run_lock import RunLock

run = Path(sys.argv[1])
holder = os.fork()
if not holder:
    RunLock(run).take()
    (run / "held").touch()
    __import__("signal").pause()
while not (run / "held").exists():
    pass
try:
    RunLock(run).take()
    print("taken twice")
except ValueError as error:
    print(f"by process {{holder}} on " in str(error))
os.kill(holder, 9)
os.waitpid(holder, 0)
RunLock(run).take()
print((run / "training.lock").read_text().split()[1] == str(os.getpid()))
"""
    assert run_fresh(program, str(tmp_path)).split() == ["True", "True"]


@pytest.mark.processes
def test_one_process_at_a_time_records_on_windows_too(tmp_path):
    program = f"""{AS_ON_WINDOWS}
from pathlib import Path

folder = Path(sys.argv[1])
with locks.alone_in(folder):
    other = os.fork()
    if not other:
        with locks.alone_in(folder):
            print("second", flush=True)
        os._exit(0)
    __import__("time").sleep(0.2)
    print("first", flush=True)
os.waitpid(other, 0)
print(memory.machine_bytes(), memory.peak_bytes())
"""
    assert run_fresh(program, str(tmp_path)).split() == ["first", "second", "None", "0"]


def test_where_the_memory_of_the_machine_is_not_known_shapes_are_drawn(monkeypatch):
    monkeypatch.setattr(shapes, "machine_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="this machine has"):
        shapes.draw(2, 32, seed=0)
    monkeypatch.setattr(shapes, "machine_bytes", lambda: None)
    assert len(shapes.draw(2, 32, seed=0).images) == 2


def test_images_are_opened_without_posix_flags_and_as_bytes(tmp_path, monkeypatch):
    Image.new("RGB", (4, 4), (10, 13, 26)).save(tmp_path / "a.bmp")
    flags = []
    real = os.open
    monkeypatch.delattr(os, "O_NONBLOCK")
    monkeypatch.setattr(os, "O_BINARY", os.O_CLOEXEC, raising=False)
    monkeypatch.setattr(os, "open", lambda path, how: flags.append(how) or real(path, how))
    with open_regular(tmp_path / "a.bmp") as file:
        assert file.read() == (tmp_path / "a.bmp").read_bytes()
    assert flags == [os.O_RDONLY | os.O_CLOEXEC]


def test_no_process_of_windows_is_sent_a_signal_to_see_whether_it_lives(monkeypatch):
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("it would end that process"))
    monkeypatch.setattr(os, "name", "nt")
    assert files._is_alive(1234567)


def test_checkpoints_are_written_where_folders_cannot_be_opened(tmp_path, monkeypatch):
    def no_folders(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", no_folders)
    with pytest.raises(PermissionError):
        checkpoint._sync_folder(tmp_path)
    monkeypatch.setattr(os, "name", "nt")
    checkpoint._sync_folder(tmp_path)


def test_the_memory_of_this_process_is_counted_in_bytes():
    from aaconv.utils.memory import machine_bytes, peak_bytes

    held = torch.ones(30_000_000)
    assert held.nbytes < peak_bytes() < machine_bytes()
