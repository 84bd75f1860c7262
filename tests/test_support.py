"""What the tests rely on: kernels' tests are shared out without a loss, and every marker is where it belongs."""

from pathlib import Path

import pytest

from support.interpreter import PART, share_of_this_process

TESTS = Path(__file__).parent


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_the_parts_of_a_file_are_all_of_its_tests_each_once(parts, monkeypatch):
    items = list(range(11))
    assert share_of_this_process(items) is None
    found = []
    for part in range(parts):
        monkeypatch.setenv(PART, f"{part}/{parts}")
        found += share_of_this_process(items)
    assert sorted(found) == items


def test_tests_that_need_a_gpu_are_marked(request):
    of_gpu = [item for item in request.session.items if TESTS / "gpu" in item.path.parents]
    others = [item for item in request.session.items if TESTS / "gpu" not in item.path.parents]
    assert all(item.get_closest_marker("gpu") for item in of_gpu)
    assert not any(item.get_closest_marker("gpu") for item in others)
