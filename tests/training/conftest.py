"""A small run that was never interrupted, and a place for another."""

import pytest

from aaconv.training.trainer import train
from support.training_runs import TEN_STEPS


@pytest.fixture(scope="module")
def whole(tmp_path_factory, one_thread, no_curves):
    """The run that was never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(TEN_STEPS, run, device="cpu")
    return run


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"
