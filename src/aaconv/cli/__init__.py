"""The command `aaconv`: subcommands and their options, no logic; handlers import only what they need."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from ..attention import chosen_default
from ..version import __version__
from . import bench, data, doctor, explore, export, inference, models, paper, recipes, train
from .parsing import Parser, add, nearest
from .recipe_options import spell_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 after an error (one line on stderr), 130 after Ctrl-C."""
    with suppress(AttributeError):  # a replaced stdout may have no encoding
        sys.stdout.reconfigure(errors="replace")
    try:
        chosen = _parse(arguments)
        chosen_default()  # a wrong one is named before anything is begun
        chosen.run(chosen)
        if sys.stdout is not None:  # None where it was closed before (>&-)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (| head): the interpreter must not try to flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("AACONV_DEBUG") == "1":
            raise
        print(f"aaconv: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "train":
        arguments = spell_out(arguments)
    chosen, unknown = _command_line().parse_known_args(arguments)
    if unknown:
        option = unknown[0].partition("=")[0]
        known = [name for action in chosen.parser._actions for name in action.option_strings]
        hint = nearest(option, known) if option.startswith("-") else ""
        chosen.parser.error(f"unexpected argument {unknown[0]!r}{hint}")
    return chosen


def _command_line() -> Parser:
    parser = Parser(prog="aaconv", description="Attention augmented convolutions for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"aaconv {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command", required=True)

    add(commands, "demo", _demo, "train a small network without and with attention, on the CPU, in minutes")

    for module in (models, paper, data, doctor, recipes, train, inference, bench, explore, export):
        module.add_commands(commands)
    return parser


def _demo(chosen: argparse.Namespace) -> None:
    from ..demo import run

    run()
