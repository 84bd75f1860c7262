"""Pages of one file: templates that lie beside the code that fills them, and the style that all pages share."""

import re
from importlib.resources import files


def read(package: str, name: str) -> str:
    """The text of a file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def base_style() -> str:
    """The style sheet that every page begins with."""
    return read(__package__, "base.css")


def fill(template: str, **parts: str) -> str:
    """The template, every {{name}} in it replaced once; what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
