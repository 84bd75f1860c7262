"""`aaconv completion SHELL`: a script that completes commands, options and names, made from the parsers."""

import argparse
import shlex
from collections.abc import Iterator

from .parsing import Parser, one_of

SHELLS = ("bash", "zsh", "fish")

BASH = """\
_aaconv() {{
    local path="${{COMP_WORDS[1]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" word="${{COMP_WORDS[COMP_CWORD]}}"
    local options="" words=""
    case "$path" in
        {groups}) [ "$COMP_CWORD" -gt 2 ] && path="$path ${{COMP_WORDS[2]}}" ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && path=""
    case "$path" in
{commands}
    esac
    case "$path $before" in
{values}
        *) [ "${{word#-}}" != "$word" ] && words="$options" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _aaconv aaconv
"""


def add_commands(commands: Parser) -> None:
    about = "print a completion script for your shell"
    completion = commands.add("completion", _completion, about, "bash >> ~/.bash_completion")
    completion.add_argument("shell", **one_of("shell", SHELLS), help=", ".join(SHELLS))


def _completion(chosen: argparse.Namespace) -> None:
    from . import command_line

    print(script(command_line(), chosen.shell), end="")


def script(parser: Parser, shell: str) -> str:
    """What the shell has to read."""
    if shell == "fish":
        return "\n".join(_fish(parser)) + "\n"
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _bash(parser)


def names_of(path: str) -> list[str]:
    """What may stand behind a command, besides files: known names."""
    from .. import recipes
    from ..cost.known import known_models
    from .paper import PLOTS

    match path:
        case "train":
            return recipes.names()
        case "recipes":
            return ["show", *recipes.names()]
        case "cost" | "eval" | "predict" | "explore" | "export":
            return known_models()
        case "table":
            return [*map(str, range(1, 10)), "all"]
        case "plot":
            return list(PLOTS)
    return []


def _paths(parser: Parser, path: str = "") -> Iterator[tuple[str, Parser]]:
    """Every parser with the words that lead to it, "" first."""
    yield path, parser
    for name, below in parser.commands.items():
        yield from _paths(below, f"{path} {name}".strip())


def _options(parser: Parser) -> Iterator[argparse.Action]:
    """Those that can be completed: of --model.OPTION the end depends on the network, --augment.OPTION is alike."""
    open_ended = ("model_options", "attention")
    return (action for action in parser.arguments if action.option_strings and action.dest not in open_ended)


def _words(path: str, parser: Parser) -> list[str]:
    choices = [
        str(choice) for action in parser.arguments if not action.option_strings for choice in action.choices or ()
    ]
    return [*parser.commands] or choices or names_of(path)


def _bash(parser: Parser) -> str:
    commands, values = [], []
    for path, command in _paths(parser):
        options = " ".join(name for action in _options(command) for name in action.option_strings)
        words = " ".join(_words(path, command))
        commands.append(f'        "{path}") options="{options}" words="{words}" ;;')
        for action in _options(command):
            if action.choices:
                before = " | ".join(f'"{path} {name}"' for name in action.option_strings)
                values.append(f'        {before}) words="{" ".join(map(str, action.choices))}" ;;')
    groups = " | ".join(name for name, command in parser.commands.items() if command.commands)
    return BASH.format(groups=groups, commands="\n".join(commands), values="\n".join(values))


def _fish(parser: Parser) -> Iterator[str]:
    for path, command in _paths(parser):
        seen = [f"__fish_seen_subcommand_from {word}" for word in path.split()]
        fewer = [f"not __fish_seen_subcommand_from {' '.join(command.commands)}"] if command.commands else []
        start = f"complete -c aaconv -n {shlex.quote('; and '.join([*seen, *fewer]))}" if seen or fewer else ""
        for name, below in command.commands.items():
            yield f"{start} -f -a {name} -d {shlex.quote(below.description or '')}"
        if not command.commands and (words := _words(path, command)):
            yield f"{start} -a {shlex.quote(' '.join(words))}"
        for action in _options(command):
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in action.option_strings
            )
            value = f" -x -a {shlex.quote(' '.join(map(str, action.choices)))}" if action.choices else " -r"
            help = (action.help or "").replace("%%", "%")
            yield f"{start} {names}{'' if action.nargs == 0 else value} -d {shlex.quote(help)}"
