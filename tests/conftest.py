"""Shared fixtures: fixed seeds, and a compiler without the memory of other tests."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_compiled():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
