"""Shared fixtures: fixed seeds, and a compiler without the memory of other tests."""

import re
import sys
from pathlib import Path

import pytest
import torch

from aaconv.attention import triton_plan
from support.detection_data import make_coco
from support.interpreted_bfloat16 import teach_bfloat16
from support.interpreter import INTERPRETED, round_products_once, share_of_this_process

GPU = Path(__file__).parent / "gpu"
SLOW_FIXTURES = {"used"}
"""Fixtures that take longer than the tests that use them."""
LARGE = re.compile(r"resnet(101|152)|mnasnet_1\d\d")
"""Parameters of tests: networks with a smaller one of their family, which is tested alike."""


def pytest_collection_modifyitems(config, items):
    for item in items:
        if GPU in item.path.parents:
            item.add_marker("gpu")
        if SLOW_FIXTURES.intersection(getattr(item, "fixturenames", ())) or LARGE.search(item.name):
            item.add_marker("slow")
    share = share_of_this_process(items)
    if share is not None:
        config.hook.pytest_deselected(items=[item for item in items if item not in share])
        items[:] = share


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_compiled():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=INTERPRETED)
def _products_of_any_cpu():
    with pytest.MonkeyPatch.context() as patch:
        round_products_once(patch)
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Sums depend on the number of threads in their last bits: as many here as in the processes that are started."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def no_curves():
    """Half a second a run; one test looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aaconv.runs.curves.draw", lambda runs, path: None)
        yield


@pytest.fixture
def nothing_recorded(tmp_path, monkeypatch):
    """A working folder, and a package without results or measurements of its own."""
    recorded = tmp_path / "recorded"
    (recorded / "benchmarks").mkdir(parents=True)
    (recorded / "benchmarks" / "table2.json").write_text("[]")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setattr("aaconv.runs.results.RECORDED", recorded)
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def packed_kernels(monkeypatch):
    """On small maps, too."""
    monkeypatch.setattr(triton_plan, "SMALL_KERNELS", ())
    triton_plan.plan_for.cache_clear()
    yield
    triton_plan.plan_for.cache_clear()


@pytest.fixture
def small_kernels(monkeypatch):
    """Those for small maps, for any number of heads."""
    monkeypatch.setattr(triton_plan, "HEADS_ON_A_MULTIPROCESSOR", 0)
    triton_plan.plan_for.cache_clear()
    yield
    triton_plan.plan_for.cache_clear()


@pytest.fixture
def poisoned_buffers(monkeypatch):
    """What a kernel forgets to write must show."""

    def poisoned(new):
        def make(tensor, *args, **kwargs):
            buffer = new(tensor, *args, **kwargs)
            plain = type(buffer) is torch.Tensor and buffer.is_floating_point()
            return buffer.fill_(float("nan")) if plain else buffer

        return make

    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


@pytest.fixture
def bfloat16(monkeypatch):
    """bfloat16 in triton's interpreter."""
    teach_bfloat16(monkeypatch)


@pytest.fixture(scope="module")
def coco_folder(tmp_path_factory):
    """Ten small images in COCO's format."""
    return make_coco(tmp_path_factory.mktemp("data") / "tiny", number=10)


@pytest.fixture(scope="module")
def coco(coco_folder):
    """Its images for evaluation."""
    from aaconv.data.coco import open_detection

    return open_detection("coco", coco_folder, "test")


@pytest.fixture(scope="module")
def detector_run(coco_folder, tmp_path_factory):
    """A run that was trained on them where nothing can compute mAP."""
    from support.detection_runs import train_without_scorer

    return train_without_scorer(coco_folder, tmp_path_factory.mktemp("runs") / "tiny")
