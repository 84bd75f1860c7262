"""Locks between processes, which end with theirs: of POSIX, and of Windows."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    BEYOND = 2**30
    """The byte that is locked: nobody else may read one that is, and what a file says should be readable."""

    def lock_now(file: int, *, exclusive: bool = True) -> None:
        """Lock an open file for this process, or raise a PermissionError. Closing it gives the lock back."""
        del exclusive  # the system has no other
        _lock_byte(file, msvcrt.LK_NBLCK)

    @contextmanager
    def alone_in(folder: Path) -> Iterator[None]:
        """One process at a time, of those that ask. A folder cannot be opened here: a file in it is locked."""
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            with suppress(OSError):
                _lock_byte(handle, msvcrt.LK_LOCK)
            yield
        finally:
            os.close(handle)

    def _lock_byte(file: int, how: int) -> None:
        os.lseek(file, BEYOND, os.SEEK_SET)
        try:
            msvcrt.locking(file, how, 1)
        finally:
            os.lseek(file, 0, os.SEEK_SET)

else:
    import fcntl

    def lock_now(file: int, *, exclusive: bool = True) -> None:
        """Lock an open file for this process, or raise a BlockingIOError or PermissionError.

        A record lock, not flock: children would inherit that, and keep it when this process is killed. But a record
        lock is lost as soon as its process closes the file anywhere.
        """
        fcntl.lockf(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)

    @contextmanager
    def alone_in(folder: Path) -> Iterator[None]:
        """One process at a time, of those that ask; all of them where the disk has no locks."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
