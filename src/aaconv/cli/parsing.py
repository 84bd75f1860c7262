"""What every command's options are made of: parsers with one-line errors, and the types of arguments."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

Run = Callable[[argparse.Namespace], None]


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, and with a memory of its own for the arguments and commands it was given."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.arguments: list[argparse.Action] = []
        self.commands: dict[str, Parser] = {}
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        return self.remember(super().add_argument(*args, **kwargs))

    def remember(self, action: argparse.Action) -> argparse.Action:
        """For an argument of a group: argparse tells only the group of it."""
        self.arguments.append(action)
        return action

    def expect(self, kind: str) -> None:
        """Make a choice of commands, or of another kind of word, which `add` adds one by one."""
        self.kind = kind
        word = f"{kind.upper()} ..."
        self.below = self.add_subparsers(title=f"{kind}s", metavar=word, dest=kind, required=True, prog=self.prog)
        self.usage = f"{self.prog} {word}"

    def add(self, name: str, run: Run | None, help: str, example: str = "") -> "Parser":
        """The parser of one command; `run` is called with its arguments, without it the parser expects another word."""
        parser = self.below.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        if run is not None:
            parser.epilog = f"example: {parser.prog} {example}".rstrip()
            parser.set_defaults(run=run)
        self.commands[name] = parser
        return parser

    def find(self, words: Iterable[str]) -> "Parser":
        """The parser of the command that the words begin with; an error suggests one where there is none."""
        parser = self
        for word in words:
            if not parser.commands or word.startswith("-"):
                break
            if word not in parser.commands:
                parser.error(f"unknown {parser.kind} {word!r}{nearest(word, parser.commands)}")
            parser = parser.commands[word]
        else:
            if parser.commands:
                parser.error(f"a {parser.kind} is missing: one of {', '.join(parser.commands)}")
        return parser

    def option_strings(self) -> list[str]:
        return [name for action in self.arguments for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"aaconv: error: {message}; see {self.prog} --help\n")


def nearest(word: object, names: Iterable[str]) -> str:
    names = list(names)
    near = get_close_matches(str(word), names, n=1)
    return f", did you mean {near[0]!r}?" if near else f"; choose one of {', '.join(names)}" if names else ""


def one_of(kind: str, names: Sequence[str]) -> dict[str, Any]:
    """How add_argument is told that an argument is one of the names: the error says which is the nearest."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown {kind} {text!r}{nearest(text, names)}")
        return text

    return {"type": read, "choices": names, "metavar": kind.upper()}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, got {text!r}")
    return int(text)
