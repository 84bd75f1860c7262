"""What every command's options are made of: one-line errors, and the types of arguments."""

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest name."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"aaconv: error: {message}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            what = action.metavar or action.dest
            raise argparse.ArgumentError(None, f"there is no {what} {value!r}{nearest(value, names)}")


def nearest(word: object, names: list[str]) -> str:
    near = get_close_matches(str(word), names, n=1)
    return f", did you mean {near[0]!r}?" if near else f"; choose one of {', '.join(names)}" if names else ""


def add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None] | None, help: str, example: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
    if run is not None:
        parser.epilog = f"example: {parser.prog} {example}".rstrip()
        parser.set_defaults(run=run)
    parser.set_defaults(parser=parser)
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, got {text!r}")
    return int(text)
