"""One trainer at a time in a run folder."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from ..utils.locks import lock_now

LOCK = "training.lock"
TRIES = 100
"""More than trainers that end in one moment; not for ever, where a disk gives a file a new number each time."""


class RunLock:
    """What a trainer holds of its run folder, from `take` to the end of the block or of the process, however it ends.

    A lock of the system on RUN/training.lock; what stands in the file only says who has it. It is lost as soon as the
    process closes the file anywhere: nothing else here may open it.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / LOCK
        self._held: int | None = None

    def take(self) -> None:
        """A ValueError names the process that has it. Without a folder, or on a disk without locks, it is not held."""
        if self._held is not None:
            return
        with suppress(OSError):
            file = self._lock()
            for _ in range(TRIES):
                if self._is_there(file):
                    break
                os.close(file)  # removed by the trainer before us, after we had opened it
                file = self._lock()
            self._held = file
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def _lock(self) -> int:
        try:
            file, exclusive = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), True
        except PermissionError:  # another user's: to see that it is held, reading is enough
            file, exclusive = os.open(self.path, os.O_RDONLY), False
        try:
            lock_now(file, exclusive=exclusive)
        except OSError as error:
            holder = os.read(file, 1000).decode(errors="replace").strip() or "another process"
            os.close(file)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            here = holder.endswith(f" on {socket.gethostname()}")
            gone = "" if here else f"; if that machine is gone, remove {self.path}"
            line = f"{self.run} is being trained by {holder}; wait for its end, or stop it first{gone}"
            raise ValueError(line) from None
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
