"""Devices by name, and autocast on them."""

import pytest
import torch

from aaconv.utils.device import pick_device
from aaconv.utils.precision import autocast, autocast_like

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """Has torch so many GPUs? As far as it says."""

    def there_are(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    return there_are


def test_a_gpu_is_taken_where_there_is_one(gpus):
    gpus(0)
    assert pick_device() == CPU
    gpus(2)
    assert pick_device() == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert pick_device("cpu", needs_gpu="bench model") == CPU


def test_what_is_not_there_is_named(gpus):
    gpus(0)
    with pytest.raises(ValueError, match="unknown device 'gpu'; choose cuda, cuda:1 or cpu"):
        pick_device("gpu")
    with pytest.raises(ValueError, match="bench model needs a GPU, and torch finds none"):
        pick_device(needs_gpu="bench model")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match="torch finds no CUDA device here; --device cpu"):
            pick_device(name)
    gpus(2)
    with pytest.raises(ValueError, match="unknown device 'cuda:2'; torch finds 2 CUDA devices"):
        pick_device("cuda:2")


@pytest.mark.parametrize(("precision", "dtype"), [("float32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_has_the_dtype_that_a_recipe_names(precision, dtype):
    with autocast(precision, CPU, cache=False):
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        assert dtype is None or torch.get_autocast_dtype("cpu") == dtype
        assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_trained_network_computes_in_float32_on_a_cpu():
    for precision in (None, "float32", "bf16"):
        with autocast_like(precision, CPU):
            assert not torch.is_autocast_enabled("cpu")
