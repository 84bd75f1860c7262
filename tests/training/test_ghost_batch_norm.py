"""Batch norm over parts of a batch: as many networks, each with its part, whose running statistics are averaged."""

import copy

import pytest
import torch
from torch import nn

from aaconv.models import create_model
from aaconv.recipes import Model
from aaconv.training.ghost_batch_norm import use_ghost_batch_norm
from aaconv.training.trainer import train
from support.training_runs import cut, end_like, tiny

GHOST = tiny(ghost_batch=8, nesterov=True, clip_grad=0.5, checkpoint_every=2, keep=9)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_part_is_normalised_alone(layout):
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(5)
    nn.init.normal_(plain.weight)
    ghost = use_ghost_batch_norm(copy.deepcopy(plain), 4)
    x = torch.randn(12, 5, 3, 7).to(memory_format=layout).requires_grad_()
    copies = [copy.deepcopy(plain) for _ in range(3)]
    expected = torch.cat([norm(part) for norm, part in zip(copies, x.split(4), strict=True)])
    found = ghost(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.is_contiguous(memory_format=layout)
    (gradient,) = torch.autograd.grad(found.pow(3).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.pow(3).sum(), x)[0])
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(norm, name) for norm in copies]).mean(0)
        torch.testing.assert_close(getattr(ghost, name), mean)
    assert ghost.num_batches_tracked == 1
    assert ghost.state_dict().keys() == plain.state_dict().keys()


def test_evaluation_and_small_batches_are_those_of_batch_norm():
    plain = nn.BatchNorm2d(3)
    ghost, x = use_ghost_batch_norm(copy.deepcopy(plain), 4), torch.randn(4, 3, 5, 5)
    assert torch.equal(ghost(x), plain(x))
    assert torch.equal(ghost.running_var, plain.running_var)
    larger = torch.randn(9, 3, 5, 5)
    assert torch.equal(ghost.eval()(larger), plain.eval()(larger))


def test_batch_norms_of_other_classes_are_refused():
    with pytest.raises(ValueError, match=r"ghost_batch is for nn.BatchNorm2d, bn1 is a BatchNormAct2d"):
        use_ghost_batch_norm(create_model("plain_mnasnet_075"), 8)


@pytest.mark.usefixtures("no_curves", "one_thread")
def test_ghost_batches_nesterov_and_clipping_are_resumed_to_the_same_bytes(run, tmp_path):
    train(GHOST, tmp_path / "whole", device="cpu")
    cut(tmp_path / "whole", run, newest=4)
    end_like(tmp_path / "whole", run)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ghost_batch": 7}, "ghost_batch must divide the images of a process and accumulation step, 16, got 7"),
        ({"ghost_batch": 16, "accumulate": 2}, "accumulation step, 8, got 16"),
        ({"ghost_batch": 8, "model": Model("plain_mnasnet_075")}, "leave it out"),
    ],
)
def test_what_cannot_be_divided_is_told_in_a_line(changes, told, run):
    with pytest.raises(ValueError, match=told):
        train(tiny(**changes), run, device="cpu")


def test_choices_that_exclude_each_other():
    with pytest.raises(ValueError, match="ghost_batch and sync_batch_norm exclude each other"):
        tiny(ghost_batch=4, sync_batch_norm=True)
    with pytest.raises(ValueError, match="in_memory is for the task 'classify', got task='detect'"):
        tiny(in_memory=True, task="detect")
    with pytest.raises(ValueError, match="nesterov is for the optimizer 'momentum', got optimizer='adamw'"):
        tiny(nesterov=True, optimizer="adamw")
