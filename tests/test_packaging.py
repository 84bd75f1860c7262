"""What is installed: all that the package reads, nothing else, and every package that it imports."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from importlib.metadata import version

import pytest
import yaml

from aaconv.cli.doctor_report import OPTIONAL
from aaconv.version import __version__
from support.places import REPOSITORY
from support.project import read_project
from support.source_tree import PACKAGE, imported_modules, modules, package_of

IMPORTED_AS = {"PIL": "pillow", "yaml": "pyyaml"}
FOUND_AT_RUN_TIME = {"triton"}
"""Torch brings it where it works; without it another backend is taken."""
FOLDERS = ("src", "tests", "examples", "docs", ".github")
BUILD = """
import sys
from setuptools import build_meta

place = sys.argv[1]  # setuptools replaces the list
build_meta.build_wheel(place)
build_meta.build_sdist(place)
"""


def distribution(requirement):
    """`aaconv[export]>=1` -> aaconv."""
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def extras():
    return read_project()["project"]["optional-dependencies"]


def test_every_file_of_the_package_is_installed():
    patterns = read_project()["tool"]["setuptools"]["package-data"]["aaconv"]
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_file()]
    data = [name for name in files if not name.endswith((".py", ".pyc"))]
    assert len(data) > 50
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert read_project()["project"]["scripts"] == {"aaconv": "aaconv.__main__:main"}


def test_every_package_that_is_imported_is_declared():
    always = {distribution(one) for one in read_project()["project"]["dependencies"]}
    declared = always | {distribution(one) for name, extra in extras().items() if name != "dev" for one in extra}
    for name, path in modules().items():
        for module in imported_modules(path.read_text(encoding="utf-8"), package_of(name, path)):
            first = module.split(".")[0]
            if first not in sys.stdlib_module_names | FOUND_AT_RUN_TIME | {"aaconv"}:
                assert IMPORTED_AS.get(first, first).replace("_", "-") in declared, f"{name} imports {first}"


def test_every_extra_that_somebody_is_told_to_install_exists():
    named = {
        (name, extra)
        for name, path in modules().items()
        for extra in re.findall(r"aaconv\[(\w+)\]", path.read_text(encoding="utf-8"))
    }
    assert {extra for _, extra in named} <= extras().keys()
    assert named
    assert {name: tuple(parts) for name, parts in extras().items() if name not in ("dev", "docs")} == OPTIONAL


def test_the_workflow_runs_every_python_that_is_declared_with_the_lowest_versions_allowed():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/checks.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    pythons = {*matrix["python"], *(more["python"] for more in matrix["include"])}
    declared = " ".join(read_project()["project"]["classifiers"])
    assert pythons == set(re.findall(r"Python :: (3\.\d+)", declared))
    pinned = re.findall(r"^(\w+)==([\d.]*\d)", (REPOSITORY / ".github/lowest.txt").read_text(), re.MULTILINE)
    allowed = read_project()["project"]["dependencies"]
    assert [f"{name}>={lowest}" for name, lowest in pinned] == [one for one in allowed if ">=" in one]


@pytest.mark.parametrize("name", ["bug", "idea", "result"])
def test_the_forms_of_issues_ask_for_something(name):
    form = yaml.safe_load((REPOSITORY / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8"))
    assert form.keys() >= {"name", "description", "body"}
    assert any(part.get("validations", {}).get("required") for part in form["body"])
    assert all(part["attributes"]["label"] for part in form["body"])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the wheel and the source distribution, made of a copy of the repository."""
    pytest.importorskip("setuptools")
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is older than pyproject.toml asks for")
    place = tmp_path_factory.mktemp("build")
    copy = place / "repository"
    copy.mkdir()
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in REPOSITORY.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(place)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    return place


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"aaconv-{__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"aaconv", f"aaconv-{__version__}.dist-info"}
    ours = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("aaconv/")} == {n for n in ours if not n.endswith(".pyc")}


@pytest.mark.slow
def test_the_source_distribution_has_the_tests_with_what_they_need(built):
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in FOLDERS:
        files = [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
        ours = {path.relative_to(REPOSITORY).as_posix() for path in files}
        missing = {name for name in ours - names if "__pycache__" not in name and ".egg-info" not in name}
        assert not missing
    assert {"LICENSE", "README.md", "Makefile", "pyproject.toml", "tests/support/places.py"} <= names


@pytest.mark.slow
def test_the_metadata_tells_who_what_and_where_it_runs(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(name).decode()
    assert "\nAuthor: the aaconv authors\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    lowest = re.search(r"\nRequires-Python: >=3\.(\d+)\n", text)[1]
    assert f"Programming Language :: Python :: 3.{lowest}\n" in text
    assert "Copyright 2026 the aaconv authors" in (REPOSITORY / "LICENSE").read_text()
