"""tools/gpu_tests.py: tests in several processes, some of which crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]
TOOL = Path(__file__).parents[1] / "tools/gpu_tests.py"
QUIET = """
import os, pytest

@pytest.mark.parametrize("n", range(6))
def test_passes(n):
    pass

def test_is_skipped():
    pytest.skip("no such thing")
"""
LOUD = """
import os, pytest, time

@pytest.mark.parametrize("n", range(4))
def test_one_of_them_ends_its_process(n):
    if n == 1:
        os.kill(os.getpid(), 9)

@pytest.mark.parametrize("n", range(4))
def test_one_of_them_ends_the_device(n):
    name = f"dead-{os.getpid()}"
    assert not os.path.exists(name), "this process has no device any more"
    if n == 2:
        open(name, "w").close()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_fails():
    one, other = 1, 2
    assert one == other

@pytest.fixture
def broken():
    yield
    raise ValueError("afterwards")

def test_fails_at_its_end(broken):
    pass
"""
ALONE = """
import pathlib, pytest

@pytest.mark.alone
def test_comes_last():
    assert pathlib.Path("beside").exists()

def test_comes_before():
    pathlib.Path("beside").touch()
"""
CONFTEST = """
import os, pathlib, pytest

@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parent)
"""


def run(tmp_path, *more, **files):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: by itself\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, TOOL, tmp_path, "--logs", tmp_path / "logs", *more]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_passes_are_counted(tmp_path):
    done = run(tmp_path, "--processes", "2", test_quiet=QUIET, test_alone=ALONE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 tests in 2 processes, then 1 alone" in done.stdout
    assert "test_quiet.py: 6 passed, 1 skipped" in done.stdout
    assert "\n8 passed, 1 skipped in " in done.stdout


def test_failures_and_crashes_are_told_in_a_line_each_and_the_rest_runs(tmp_path):
    done = run(tmp_path, "--processes", "2", test_quiet=QUIET, test_loud=LOUD)
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "CRASHED"))]
    assert done.returncode == 1
    assert "\n12 passed, 3 failed, 1 crashed, 1 skipped in " in done.stdout
    assert len(told) == 4
    for test, why in [
        ("test_fails", "assert 1 == 2"),
        ("test_fails_at_its_end", "ValueError: afterwards"),
        ("test_one_of_them_ends_its_process[1]", "its process ended with signal 9"),
        ("test_one_of_them_ends_the_device[2]", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ]:
        assert any(f"::{test}: " in line and line.endswith(why) for line in told), (test, told)
    assert "assert one == other" in (tmp_path / "logs/failures.txt").read_text()


def test_what_cannot_be_imported_is_a_failure(tmp_path):
    done = run(tmp_path, test_broken="import no_such_module\n", test_quiet=QUIET)
    assert done.returncode == 1
    assert "test_broken.py: ModuleNotFoundError: No module named 'no_such_module'" in done.stdout


def test_a_limit_ends_it_and_says_what_did_not_run(tmp_path):
    slow = "import time\n\ndef test_a():\n    time.sleep(600)\n"
    done = run(tmp_path, "--limit", "8", test_slow=slow, test_quiet=QUIET)
    assert done.returncode == 1
    assert "1 skipped, 1 not run in " in done.stdout
