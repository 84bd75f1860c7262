"""The command `aaconv`, outside the package: importing that takes seconds, and Ctrl-C must be clean then, too."""

import os
import signal


def main() -> int:
    """Run the command line of the package; the exit code is the shell's."""
    # At once, not by an exception: imports swallow those here and there. Nothing has been begun that could be lost.
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from aaconv.cli import main as run

    signal.signal(signal.SIGINT, before)
    return run()
