"""Files that are there whole or not at all."""

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


class Unwritable(OSError):
    """The system does not let `filename` be written: errno and strerror say why, the text also what to do."""

    def __str__(self) -> str:
        reason = self.strerror
        if self.errno == errno.ENOENT:  # "No such file" says nothing about one that is to be made
            parent = Path(self.filename).resolve().parent
            reason = f"{parent} {'is not writable' if parent.is_dir() else 'is gone'}"
        room = "make room there or " if self.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{self.filename} cannot be written: {reason}; {room}choose another place"


@contextmanager
def naming_unwritable(path: str | Path, names: Collection[str | Path] | None = None) -> Iterator[None]:
    """Within it errors of the system become `Unwritable`, of `path`; with `names`, only those of these files."""
    try:
        yield
    except (ConnectionError, TimeoutError, ChildProcessError):
        raise  # of no file; a broken pipe among them, the reader of which has gone
    except OSError as error:
        # Writing into a file that is open names none.
        others = names is not None and error.filename is not None and str(error.filename) not in map(str, names)
        if error.errno is None or others:
            raise
        raise Unwritable(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name beside `path`, with its suffix, to write to; it takes the place of `path` if nothing goes wrong.

    What is not a plain file, such as /dev/null, is written to directly. Errors name `path`.
    """
    path = Path(path)
    with naming_unwritable(path):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder, not a file to write")
        check_parent(path)
        target = path.resolve()  # a link stays a link
        direct = path.exists() and not path.is_file()
    if direct:
        with naming_unwritable(path, [path]):
            yield path
        return
    draft = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    with naming_unwritable(path, [path, target, draft]):
        try:
            yield draft
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)


def check_parent(path: Path) -> None:
    """An OSError where there is no folder to make `path` in."""
    if not path.parent.exists():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in; make it first")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{path.parent} is a file, not a folder to write {path.name} in; choose another")


def check_writable(path: str | Path) -> None:
    """Raise now what `replacing` would raise later; nothing is left behind, and what is there stays."""
    try:
        with replacing(path) as draft:
            draft.open("a").close()
            raise _Enough
    except _Enough:
        pass


class _Enough(Exception):
    """Nothing went wrong, and nothing is to be replaced."""
