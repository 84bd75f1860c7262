"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name beside `path`, with its suffix, to write to; it takes the place of `path` if nothing goes wrong.

    What is no plain file, such as /dev/null, is written to directly. Errors name `path`.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file to write")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in; make it first")
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()  # a link stays a link
    draft = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield draft
        os.replace(draft, target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


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
