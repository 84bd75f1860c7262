"""The description on a package index: README.md with links that hold there. Everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def description(markdown: str, repository: str | None) -> str:
    """Links and pictures of the repository under its address; where pyproject.toml names none, their words alone."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if repository is None:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, markdown)


def repository_address(pyproject: str) -> str | None:
    found = re.search(r'^\[project\.urls\].*?^Repository = "(.+?)/?"$', pyproject, flags=re.MULTILINE | re.DOTALL)
    return found and found[1]


if __name__ == "__main__":
    here = Path(__file__).parent
    address = repository_address((here / "pyproject.toml").read_text(encoding="utf-8"))
    text = description((here / "README.md").read_text(encoding="utf-8"), address)
    setup(long_description=text, long_description_content_type="text/markdown")
