"""One trainer at a time in a run folder."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None

LOCK = "training.lock"


class RunLock:
    """What a trainer holds of its run folder, from `take` to the end of the block or of the process, however it ends.

    A record lock of the system on RUN/training.lock; what stands in the file only says who has it. Not flock: workers
    that load data would inherit that, and keep it when the trainer is killed. But a record lock is lost as soon as its
    process closes the file anywhere: nothing else here may open it.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / LOCK
        self._held: int | None = None

    def take(self) -> None:
        """A ValueError names the process that has it. Without a folder, or on a disk without locks, it is not held."""
        if fcntl is None or self._held is not None:
            return
        with suppress(OSError):
            file = self._lock()
            if not self._is_there(file):  # removed by the trainer before us, after we had opened it: once more
                os.close(file)
                file = self._lock()
            self._held = file
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def _lock(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(file, 1000).decode(errors="replace").strip() or "another process"
            os.close(file)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise ValueError(f"{self.run} is being trained by {holder}; wait for its end, or stop it first") from None
        return file

    def _is_there(self, file: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(file))
        return False

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is None:
            return
        with suppress(OSError):
            if self._is_there(self._held):  # the folder may have vanished, and another have its name
                self.path.unlink()
        os.close(self._held)
        self._held = None
