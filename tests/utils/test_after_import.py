"""What is to be done after an import is done once, then, and leaves no trace in the package."""

import importlib.util
import sys

import pytest

from aaconv.utils.after_import import after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package that nobody has imported."""
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text("value = 1\n")
    (tmp_path / "late_package" / "part.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "late_package"
    for name in ("late_package", "late_package.part"):
        sys.modules.pop(name, None)


def test_it_is_done_after_the_import_and_once(package):
    done = []
    before = list(sys.meta_path)
    after_import(package, lambda: done.append(sys.modules[package].value))
    assert importlib.util.find_spec(package) is not None
    assert done == []
    import late_package.part

    assert (done, late_package.part.value) == ([1], 2)
    assert sys.meta_path == before
    assert type(late_package.__loader__) is type(late_package.part.__loader__)
    assert late_package.__spec__.loader is late_package.__loader__
    importlib.reload(late_package)
    assert done == [1]


def test_it_is_done_at_once_where_the_package_is_imported(package):
    import late_package

    done = []
    after_import(package, lambda: done.append(late_package.value))
    assert done == [1]


def test_a_package_that_is_not_there_stays_so(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    after_import("no_such_package", lambda: pytest.fail("nothing was imported"))
    assert importlib.util.find_spec("no_such_package") is None
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        import no_such_package  # noqa: F401


def test_an_import_that_fails_is_waited_for_again(package, tmp_path):
    done = []
    after_import(package, lambda: done.append(True))
    file = tmp_path / package / "__init__.py"
    file.write_text("raise ValueError('not yet')\n")
    with pytest.raises(ValueError, match="not yet"):
        import late_package
    file.write_text("value = 'another one'\n")
    importlib.invalidate_caches()
    import late_package

    assert (late_package.value, done) == ("another one", [True])


def test_the_loader_can_be_asked_for_what_it_knows(package):
    after_import(package, lambda: None)
    assert importlib.util.find_spec(package).loader.get_filename().endswith("__init__.py")
