"""Ctrl-C and SIGTERM: noted when they come, obeyed between two steps."""

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Within it the signals only set `received`, 0 before; a second Ctrl-C ends the process at once."""

    received = 0

    def __enter__(self) -> "Interrupts":
        self._owner, self._before = os.getpid(), {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # A loader's worker has inherited this: Ctrl-C reaches it, too, but the run decides when it ends.
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        self.received = self.received or number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
