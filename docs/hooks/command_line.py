"""command-line.md: every command with its arguments, from the parsers themselves."""

import argparse
import html
import os
import re
from collections.abc import Iterator
from unittest.mock import patch

from package_tables import markdown_table

from aaconv.cli import command_line
from aaconv.cli.parsing import Parser


def command_line_page() -> str:
    return "\n\n".join(part for path, parser in _commands(command_line()) for part in _command(path, parser))


def _commands(parser: Parser, path: str = "aaconv") -> Iterator[tuple[str, Parser]]:
    for name, below in parser.commands.items():
        if below.commands:
            yield from _commands(below, f"{path} {name}")
        else:
            yield f"{path} {name}", below


def _command(path: str, parser: Parser) -> Iterator[str]:
    yield f"## {path}"
    yield parser.description or ""
    with patch.dict(os.environ, COLUMNS="100"):
        yield f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```"
    arguments = [action for action in parser.arguments if action.dest != "help"]
    if arguments:
        yield markdown_table(("argument", "meaning"), map(_argument, arguments))
    if parser.epilog:
        yield f"Example: `{parser.epilog.removeprefix('example: ')}`"


def _argument(action: argparse.Action) -> tuple[str, str]:
    value = "" if action.nargs == 0 or not action.option_strings else f" {_value(action)}"
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{_value(action)}`"
    meaning = (action.help or "") % {"default": action.default} if "%" in (action.help or "") else action.help or ""
    # Words in back quotes stay as they are; stars and angle brackets elsewhere would be Markdown.
    parts = re.split(r"(`[^`]*`)", meaning.replace("|", "\\|"))
    escaped = (part if part.startswith("`") else html.escape(part, quote=False).replace("*", "\\*") for part in parts)
    return names.replace("|", "\\|"), "".join(escaped)


def _value(action: argparse.Action) -> str:
    name = action.metavar or action.dest.upper()
    many = {"+": f"{name} ...", "*": f"[{name} ...]", "?": f"[{name}]"}
    return many.get(action.nargs if isinstance(action.nargs, str) else "", str(name))
