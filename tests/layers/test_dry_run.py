"""Models built and run without memory."""

import pytest
import torch
from torch import nn

from aaconv import AAConv2d
from aaconv.layers import dry_run


class Constants(nn.Module):
    """Makes tensors as careless forwards do, and keeps some."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.scale = torch.rand(4, 1, 1)  # neither parameter nor buffer
        self.tables = [torch.rand(4, 1, 1)]
        self.kept = None

    def forward(self, x):
        x = self.conv(x) * self.scale + self.tables[0]
        index = torch.tensor([3, 1, 0, 2])
        self.kept = torch.cat([torch.zeros(len(x), 1, *x.shape[2:]), x[:, index]], dim=1)
        return torch.where(torch.arange(5)[:, None, None] > 2, self.kept, 0.0)


def test_a_copy_runs_without_memory_and_leaves_the_model_alone():
    model = Constants()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin, copied = dry_run.copy_without_memory(model)
    out = dry_run.run(twin, torch.zeros(1, dtype=torch.float32).expand(2, 3, 100, 300))
    assert out.is_meta
    assert out.shape == (2, 5, 100, 300)
    assert twin is copied[id(model)]
    assert twin.conv is copied[id(model.conv)]
    assert all(tensor.is_meta for tensor in (*twin.state_dict().values(), twin.scale, twin.kept))
    assert not twin.training
    assert model.training
    assert model.kept is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_run_takes_the_memory_of_nothing():
    """2**44 pixels of 64 channels."""
    twin, _ = dry_run.copy_without_memory(nn.Conv2d(3, 64, 1))
    assert dry_run.run(twin, torch.empty(1, 3, 2**22, 2**22, device="meta")).shape[1] == 64


def test_what_is_shared_stays_shared():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    twin, _ = dry_run.copy_without_memory(model)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not model[0].weight


def test_lazy_tables_are_made_in_the_copy_alone():
    layer = AAConv2d(6, 16, 3, num_heads=1, dtype=torch.float64)
    twin, _ = dry_run.copy_without_memory(layer)
    dry_run.run(twin, torch.empty(1, 6, 5, 7, dtype=torch.float64))
    assert twin.size == (5, 7)
    assert (twin.rel_h.dtype, twin.rel_h.is_meta) == (torch.float64, True)
    assert layer.size is None


@pytest.mark.parametrize("part", ["whole", "inside"])
def test_compiled_parts_run_as_they_are_written(part):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    compiled = torch.compile(model) if part == "whole" else nn.Sequential(torch.compile(model), nn.Identity())
    twin, _ = dry_run.copy_without_memory(compiled)
    assert not any("_orig_mod" in name for name, _ in twin.named_modules())
    assert dry_run.run(twin, torch.empty(1, 3, 8, 8)).shape == (1, 4, 6, 6)
    assert dry_run.uncompiled(torch.compile(model)) is model


def test_building_without_memory():
    assert dry_run.build(lambda: nn.Linear(2**20, 2**20)).weight.is_meta


def test_a_constructor_that_reads_values_gets_them():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.rates = torch.linspace(0, 1, 3).tolist()

    assert dry_run.build(Reads).rates == [0.0, 0.5, 1.0]


def test_an_error_of_the_constructor_is_its_own():
    def fails():
        raise RuntimeError("three heads")

    with pytest.raises(RuntimeError, match="three heads"):
        dry_run.build(fails)
