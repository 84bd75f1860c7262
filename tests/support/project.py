"""What pyproject.toml says."""

import sys

from support.places import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there, too


def read_project():
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
