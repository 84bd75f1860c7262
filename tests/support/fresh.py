"""A program in a process of its own, which has imported nothing yet."""

import os
import subprocess
import sys
from pathlib import Path

import aaconv

SOURCE = str(Path(aaconv.__file__).parents[1])
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def run_fresh(program, *arguments, absent=(), cwd=None, **environment):
    """What the program printed; `absent` are packages that are not installed there. It fails as a test does."""
    block = WITHOUT.format(absent=set(absent)) if absent else ""
    paths = [SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", block + program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
