"""The command `aaconv`, which `python -m aaconv` is, too."""

import os
import signal
import sys
from types import FrameType

IMPORTING = "<frozen importlib"


def main() -> int:
    """Run the command line; the exit code is the shell's."""
    signal.signal(signal.SIGINT, _interrupted)
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C ends a command that is still importing at once, not by an exception: imports swallow those here and
    there, and nothing has been begun that could be lost."""
    if is_importing(frame):
        os._exit(130)
    raise KeyboardInterrupt


def is_importing(frame: FrameType | None) -> bool:
    """Is the innermost frame of the command line in the middle of an import, its own or another module's?"""
    inside = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("aaconv.cli") and frame.f_code.co_name == "<module>":
            return True
        if name == __name__ or name.startswith("aaconv.cli"):
            return inside.startswith(IMPORTING)
        inside, frame = frame.f_code.co_filename, frame.f_back
    return False


if __name__ == "__main__":
    sys.exit(main())
