"""A griffe extension: arguments in our docstrings, `name: what it means`, become a list, examples code."""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"(\w+(?:(?: \||,) \w+)*): (.*)")


class ArgumentList(griffe.Extension):
    """Docstrings are plain text here: without this a paragraph of arguments would run together."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring:
            known = {parameter.name for parameter in func.parameters}
            func.docstring.value = as_list(as_code(func.docstring.value), known)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring:
            cls.docstring.value = as_list(as_code(cls.docstring.value), None)


def as_list(text: str, known: set[str] | None) -> str:
    """Lines `name: ...` with names of arguments (None: any that are not capitalised) as items, what follows them
    indented as a part of the item."""
    lines, inside, code = [], False, False
    for line in text.splitlines():
        code ^= line.startswith("```")
        found = ARGUMENT.fullmatch(line)
        names = re.split(r" \| |, ", found[1]) if found else []
        if found and all(name in known if known is not None else name.islower() for name in names):
            if not inside:
                lines.append("")
            lines.append(f"- {', '.join(f'`{name}`' for name in names)}: {plain(found[2])}")
            inside = True
        else:
            inside = inside and line.startswith(" ")
            lines.append(line if code or (line.startswith("    ") and not inside) else plain(line))
    return "\n".join(lines)


def plain(line: str) -> str:
    """Stars of products and numbers at the beginning of a line, which Markdown would take for its own."""
    line = re.sub(r"^(\s*\d+)\. ", r"\1\\. ", line)
    return "".join(part if part.startswith("`") else part.replace("*", "\\*") for part in re.split(r"(`[^`]*`)", line))


def as_code(text: str) -> str:
    """Paragraphs of examples (`>>> `) between fences: Markdown would take them for quotations."""
    parts = re.split(r"\n\n", text)
    return "\n\n".join(f"```pycon\n{part}\n```" if part.startswith(">>> ") else part for part in parts)
