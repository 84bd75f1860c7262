"""Files that are there whole or not at all."""

import errno
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
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
        target = resolved(path)  # a link stays a link
        direct = path.exists() and not path.is_file()
    if direct:
        with naming_unwritable(path, [path]):
            yield path
        return
    # Nobody can guess it, and so nobody can have made it a link to something else.
    draft = target.with_name(f".{target.stem[:150]}.{os.getpid()}-{secrets.token_hex(8)}{target.suffix}")
    with naming_unwritable(path, [path, target, draft]):
        try:
            yield draft
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)


def resolved(path: str | Path) -> Path:
    """The absolute path without links; an OSError where they lead round in a circle."""
    try:
        return Path(path).resolve()
    except RuntimeError:  # of Python before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def remove_stale_drafts(folder: Path, names: Iterable[str]) -> None:
    """Remove what `replacing` left in a folder of these files when its process was killed.

    Only for one who alone writes them: drafts of a process that runs here stay, but other machines are not asked.
    """
    for name in names:
        stem, suffix = re.escape(Path(name).stem[:150]), re.escape(Path(name).suffix)
        pattern = re.compile(rf"\.{stem}\.(\d+)(-[0-9a-f]{{16}})?{suffix}")
        for path in folder.iterdir():
            match = pattern.fullmatch(path.name)
            if match and not _is_alive(int(match[1])):
                path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Whether there is such a process here; True on Windows, where os.kill would not ask but end it."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


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
