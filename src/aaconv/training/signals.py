"""Ctrl-C and SIGTERM: answered at once, obeyed between two steps."""

import os
import signal
import socket
import threading
from contextlib import suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ANSWERS: dict[int, str] = {
    signal.SIGINT: "finishing the step, then saving a checkpoint; Ctrl-C again stops now",
    signal.SIGTERM: "finishing the step, then saving a checkpoint",
}


class Interrupts:
    """Within it the signals only set `received`, 0 before; a second Ctrl-C ends the process at once.

    answer: say so on stderr as soon as a signal comes, also while a step computes for minutes. Python's own handler
    waits for the end of the running operation, which may be a whole backward pass: a thread listens meanwhile.
    """

    received = 0

    def __init__(self, *, answer: bool = False) -> None:
        self._answer = answer

    def __enter__(self) -> "Interrupts":
        self._owner, self._before = os.getpid(), {}
        self._listener: _Listener | None = None
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            self._listener = _Listener() if self._answer else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()
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


class _Listener:
    """A thread that is woken by the system when a signal comes, whatever the main thread does."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs, self._owner = theirs, os.getpid()
        self._before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        _listening.append(self)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        interrupts = 0
        while data := self._ours.recv(1):
            number = data[0]
            if number == signal.SIGINT and interrupts:
                os._exit(128 + number)  # the handler of the first may still wait for the end of an operation
            interrupts += number == signal.SIGINT
            if number in ANSWERS:
                line = f"aaconv: {ANSWERS[number]}\n"
                with suppress(OSError):
                    os.write(2, (f"\n{line}" if os.isatty(2) else line).encode())

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        _listening.remove(self)
        self._theirs.close()  # the thread reads the end
        self._thread.join(timeout=1)
        self._ours.close()


_listening: list[_Listener] = []


def _forget_in_child() -> None:
    """A worker has inherited where signals are written to, and would write its own there, too."""
    if _listening and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):  # Windows starts its workers anew
    os.register_at_fork(after_in_child=_forget_in_child)
