"""The command `aaconv`: subcommands and their options, no logic; only what is run imports torch."""

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..version import __version__
from . import bench, completion, data, doctor, explore, export, finetune, inference, models, paper, recipes, train
from .parsing import Parser, nearest
from .recipe_options import MODEL_OPTION, spell_out

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Reasons why a file cannot be written."""
BACKENDS = ("eager", "sdpa", "triton")
"""Those of aaconv.attention, which is not imported for their names: that takes seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 after an error (one line on stderr), 130 after Ctrl-C."""
    with suppress(AttributeError):  # a replaced stdout may have no encoding
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        chosen = _parse(sys.argv[1:] if arguments is None else arguments)
        _check_backend()
        chosen.run(chosen)
        if sys.stdout is not None:  # None where it was closed before (>&-)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (| head): the interpreter must not try to flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        reason = _reason(error)
        if reason is None or os.environ.get("AACONV_DEBUG") == "1":
            raise
        line = f"aaconv: error: {' '.join(reason.split())}"
        print(line, file=sys.stderr)
        _tell_torchrun(line)
        return 2
    return 0


def command_line() -> Parser:
    """The parser of the whole command."""
    parser = Parser(prog="aaconv", description="Attention augmented convolutions for PyTorch.")
    parser.add_argument("-V", "--version", action="version", version=f"aaconv {__version__}")
    parser.expect("command")
    parser.add("demo", _demo, "train small networks with and without attention on the CPU")
    for module in (
        recipes,
        train,
        finetune,
        inference,
        explore,
        models,
        paper,
        data,
        export,
        bench,
        doctor,
        completion,
    ):
        module.add_commands(parser)
    return parser


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = command_line()
    command = parser.find(words)
    if not {"--model.OPTION", "--augment.OPTION"}.isdisjoint(command.option_strings()):
        words = spell_out(words)
    chosen, unknown = parser.parse_known_args(words)
    if unknown:
        option = unknown[0].removeprefix(f"{MODEL_OPTION}OPTION=").partition("=")[0]
        if unknown[0].startswith(MODEL_OPTION):
            name = option.removeprefix(MODEL_OPTION).replace("_", "-")
            command.error(f"{MODEL_OPTION}{name} is an option of train; here a network is as its name or run says")
        hint = nearest(option, command.option_strings()) if option.startswith("-") else ""
        command.error(f"unexpected argument {unknown[0]!r}{hint}")
    return chosen


def _reason(error: Exception) -> str | None:
    """What a person can do something about; None where the program is wrong."""
    if isinstance(error, ValueError | OSError):
        return str(error)
    cause = getattr(error, "inner_exception", None)  # what has stopped torch's compiler
    if isinstance(cause, OSError) and cause.errno in UNWRITABLE:
        return f"torch.compile cannot write its files: {cause}; set TORCHINDUCTOR_CACHE_DIR to another folder"
    return None


def _check_backend() -> None:
    """A wrong name in the environment is reported before anything is begun."""
    name = os.environ.get("AACONV_BACKEND")
    if name and name not in BACKENDS:
        raise ValueError(f"AACONV_BACKEND must be one of {', '.join(BACKENDS)}, got {name!r}")


def _tell_torchrun(line: str) -> None:
    """torchrun ends with a report of its own, in which the reason stands where the process has left it in this file."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _demo(chosen: argparse.Namespace) -> None:
    from ..demo import run

    run()
