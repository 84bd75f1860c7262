"""The learning rate at exact steps, and the optimiser as the paper wants it."""

import json
import math

import pytest
import torch
from torch import nn

from aaconv import AAConv2d, augment
from aaconv.models import create_model
from aaconv.training.optimize import (
    batch_norm_scales,
    load_optimizer,
    make_optimizer,
    make_schedule,
    optimizer_tensors,
    peak_rate,
    rate_of,
)
from support.training_runs import tiny

STEPS = 10  # an epoch


def rates(recipe, *steps):
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(recipe, model)
    schedule = make_schedule(recipe, optimizer, STEPS)
    found = []
    for step in steps:
        schedule.step_update(step)
        found.append(rate_of(optimizer))
    return found


def test_the_papers_rule_for_the_peak():
    assert peak_rate(tiny(lr=None, batch=1024, lr_base=0.2, lr_base_size=256)) == 0.8
    assert peak_rate(tiny(lr=None, batch=64, lr_base=0.128, lr_base_size=256)) == 0.032
    assert peak_rate(tiny(lr=0.3, batch=64)) == 0.3


def test_warm_up_from_zero_then_cosine():
    """40 epochs of 10 steps: 5% are 20 steps up, then 380 down to nothing."""
    recipe = tiny(epochs=40, lr=0.8, warmup=0.05, schedule="cosine")
    found = rates(recipe, 0, 1, 10, 19, 20, 115, 210, 305, 399)
    expected = [0.8 * step / 20 for step in (0, 1, 10, 19)]
    expected += [0.4 * (1 + math.cos(math.pi * (step - 20) / 380)) for step in (20, 115, 210, 305, 399)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[4] == 0.8
    assert found[6] == pytest.approx(0.4)


def test_cosine_to_a_least_rate():
    recipe = tiny(epochs=4, lr=0.5, warmup=0.0, min_lr=0.1)
    assert rates(recipe, 0, 20, 40) == pytest.approx([0.5, 0.3, 0.1])


def test_steps_at_the_epochs_that_are_named():
    """A tenth at epochs 30, 60, 80 and 90, as on ImageNet; each holds from its first step on."""
    recipe = tiny(epochs=100, lr=0.512, warmup=0.05, schedule="step", decay_epochs=(30.0, 60.0, 80.0, 90.0))
    steps = (0, 25, 49, 50, 299, 300, 599, 600, 799, 800, 899, 900, 999)
    tenths = (None, None, None, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4)
    expected = [0.512 * step / 50 if power is None else 0.512 * 0.1**power for step, power in zip(steps, tenths)]  # noqa: B905
    assert rates(recipe, *steps) == pytest.approx(expected)


def test_exponential_decay_every_few_epochs():
    recipe = tiny(epochs=50, lr=1.0, warmup=0.1, schedule="exponential", decay_epochs=(2.4,), decay_rate=0.97)
    steps = (10, 49, 50, 71, 72, 95, 96, 499)
    expected = [step / 50 if step < 50 else 0.97 ** (step // 24) for step in steps]
    assert rates(recipe, *steps) == pytest.approx(expected)


def test_constant_rate_after_the_warm_up():
    recipe = tiny(epochs=10, lr=0.3, warmup=0.1, schedule="constant")
    assert rates(recipe, 0, 5, 10, 55, 99) == pytest.approx([0.0, 0.15, 0.3, 0.3, 0.3])


def test_no_warm_up_begins_at_the_peak():
    assert rates(tiny(epochs=2, lr=0.3, warmup=0.0), 0) == [0.3]


def test_a_least_rate_without_a_cosine_is_refused():
    with pytest.raises(ValueError, match="min_lr is for the cosine schedule"):
        rates(tiny(schedule="constant", min_lr=0.1), 0)


def test_the_weight_decay_holds_for_all_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    optimizer = make_optimizer(tiny(weight_decay=5e-4), model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_weights_that_do_not_decay(name):
    torch.manual_seed(0)
    layer = AAConv2d(8, 16, 3, num_heads=2, key_channels=8, value_channels=4, size=4)
    recipe = tiny(optimizer=name, lr=0.1, weight_decay=0.5, no_decay=("rel_?", "qkv.weight"))
    optimizer = make_optimizer(recipe, layer)
    before = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    for weight in layer.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = {name for name, weight in layer.named_parameters() if torch.equal(weight, before[name])}
    assert kept == {"rel_h", "rel_w", "qkv.weight"}
    assert rate_of(optimizer) == 0.1


def test_all_or_none_of_the_weights_may_decay():
    for no_decay, decays in ((("*",), [0.0]), ((), [5e-4])):
        optimizer = make_optimizer(tiny(weight_decay=5e-4, no_decay=no_decay), nn.Linear(2, 2))
        assert [group["weight_decay"] for group in optimizer.param_groups] == decays


def test_a_name_of_no_weight_is_told():
    with pytest.raises(ValueError, match=r"no weight of .* is called '.*rel_x', as 'weight' is"):
        make_optimizer(tiny(no_decay=("*.rel_x",)), nn.Linear(2, 2))


@pytest.mark.parametrize(("name", "nesterov"), [("momentum", False), ("sgd", True)])
def test_momentum_is_classical_unless_sgd_is_asked_for(name, nesterov):
    optimizer = make_optimizer(tiny(optimizer=name, momentum=0.8), nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["nesterov"] is nesterov
    assert optimizer.defaults["momentum"] == 0.8


class OnGpu(nn.Parameter):
    """What says that it is on a GPU; torch has the fused step for the CPU, too."""

    is_cuda = True


@pytest.mark.parametrize("name", ["momentum", "sgd"])
def test_the_first_fp16_step_on_a_gpu_may_overflow(name):
    """Fused SGD then skips it, and must not take what was in memory for momentum in the next one."""
    model = nn.Linear(2, 2)
    for key, parameter in list(model.named_parameters()):
        setattr(model, key, OnGpu(torch.zeros_like(parameter)))
    optimizer = make_optimizer(tiny(optimizer=name, momentum=0.5, lr=1.0, weight_decay=0.0), model)
    assert all(group["fused"] for group in optimizer.param_groups)
    assert {tuple(state) for state in optimizer.state.values()} == {("momentum_buffer",)}
    assert all(state["momentum_buffer"].eq(0).all() for state in optimizer.state.values())
    assert len(optimizer.state) == 2
    assert not make_optimizer(tiny(optimizer="momentum", momentum=0.0), model).state


def test_rmsprop_of_tensorflow():
    optimizer = make_optimizer(tiny(optimizer="rmsproptf", momentum=0.9, eps=1e-3), nn.Linear(2, 2))
    assert type(optimizer).__name__ == "RMSpropTF"
    assert optimizer.defaults["eps"] == 1e-3


def test_an_optimiser_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="optimizer='momentun' cannot be used"):
        make_optimizer(tiny(optimizer="momentun"), nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["momentum", "rmsproptf", "adamw"])
def test_the_state_goes_there_and_back(name):
    def start():
        torch.manual_seed(3)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, make_optimizer(tiny(optimizer=name), model)

    def step(model, optimizer, seed):
        model(torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = start()
    step(model, optimizer, 0)
    tensors, rest = optimizer_tensors(optimizer)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    tensors = {key: value.clone().contiguous() for key, value in tensors.items()}
    step(model, optimizer, 1)

    again, other = start()
    again.load_state_dict(weights)
    load_optimizer(other, tensors, rest)
    step(again, other, 1)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
    layouts = [value.stride() for value in other.state[again.weight].values() if value.ndim == 4]
    assert layouts == [again.weight.stride()] * len(layouts)


def saved_after_a_step(optimizer, model):
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    tensors, rest = optimizer_tensors(optimizer)
    return tensors, json.loads(json.dumps(rest))


@pytest.mark.parametrize("name", ["momentum", "sgd", "adamw", "rmsproptf", "lamb", "adafactor", "lion", "nadamw"])
def test_every_optimizer_is_taken_back(name):
    model = create_model("plain_small", num_classes=2)
    recipe = tiny(optimizer=name, lr=1e-3)
    tensors, rest = saved_after_a_step(make_optimizer(recipe, model), model)
    other = make_optimizer(recipe, model)
    load_optimizer(other, tensors, rest)
    again, numbers = optimizer_tensors(other)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)
    assert json.loads(json.dumps(numbers)) == rest


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors, rest: rest.update(groups="x"), "has not 1 groups of parameters"),
        (lambda tensors, rest: rest["groups"].append({}), "has not 1 groups of parameters"),
        (lambda tensors, rest: rest["groups"][0].update(params=[0]), "other groups of parameters"),
        (lambda tensors, rest: rest["groups"][0].update(params="x"), "other groups of parameters"),
        (lambda tensors, rest: rest["groups"][0].update(momentum="x"), "the 'momentum' of its optimizer is 'x'"),
        (lambda tensors, rest: rest["groups"][0].update(weight_decay=[1]), "the 'weight_decay' of its optimizer is"),
        (lambda tensors, rest: rest["groups"][0].update(nesterov=0.3), "the 'nesterov' of its optimizer is"),
        (lambda tensors, rest: rest["groups"][0].update(betas=[0.9, 0.99]), "has 'betas', that of the recipe has not"),
        (lambda tensors, rest: rest["numbers"].update({"0.step": "x"}), "the 'step' of its optimizer does not fit"),
        (lambda tensors, rest: rest["numbers"].update({"x.step": 1}), "invalid literal"),
        (lambda tensors, rest: rest["numbers"].update({"9999.step": 1}), "index out of range"),
        (lambda tensors, rest: tensors.update({"0.momentum_buffer": torch.ones(1)}), "the 'momentum_buffer' of its"),
    ],
)
def test_a_state_that_does_not_fit_is_named(change, told):
    model = create_model("plain_small", num_classes=2)
    recipe = tiny(optimizer="momentum", lr=1e-3)
    tensors, rest = saved_after_a_step(make_optimizer(recipe, model), model)
    change(tensors, rest)
    with pytest.raises((ValueError, IndexError), match=told):
        load_optimizer(make_optimizer(recipe, model), tensors, rest)


def test_a_state_of_an_older_torch_lacks_what_is_new():
    model = create_model("plain_small", num_classes=2)
    recipe = tiny(optimizer="adamw", lr=1e-3)
    tensors, rest = saved_after_a_step(make_optimizer(recipe, model), model)
    removed = {name: rest["groups"][0].pop(name) for name in ("decoupled_weight_decay", "fused")}
    optimizer = make_optimizer(recipe, model)
    load_optimizer(optimizer, tensors, rest)
    assert {name: optimizer.param_groups[0][name] for name in removed} == removed


@pytest.mark.parametrize("inside", [False, True])
def test_what_augment_excludes_from_weight_decay_is_excluded(inside):
    options = {"combine": "add", "num_heads": 2, "key_channels": 8, "value_channels": 4}
    network, _ = augment(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), 9, where="0", **options)
    model = nn.ModuleDict({"backbone": network}) if inside else network
    decayed, kept = make_optimizer(tiny(weight_decay=0.1), model).param_groups
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    assert {names[id(parameter)] for parameter in kept["params"]} == {"0.rel_h", "0.rel_w", "0.gate"}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)


def as_before_the_scales(model, tensors, rest):
    """The state of an optimiser as if the batch norms had no learned scale: other parameters in the same order."""
    scales = batch_norm_scales(model)
    kept = [place for place, parameter in enumerate(model.parameters()) if parameter not in scales]
    renumbered = {
        f"{kept.index(int(place))}.{name}": value
        for (place, _, name), value in ((key.partition("."), value) for key, value in tensors.items())
        if int(place) in kept
    }
    (group,) = rest["groups"]
    return renumbered, rest | {"groups": [group | {"params": list(range(len(kept)))}]}


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_state_from_before_learned_batch_norm_scales_loads(optimizer):
    """Every parameter keeps its own state; the scales begin with zeros."""
    torch.manual_seed(0)
    model, recipe = create_model("plain_wrn16_4", width=1), tiny(optimizer=optimizer)
    first = make_optimizer(recipe, model)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    first.step()
    tensors, rest = optimizer_tensors(first)
    scales = batch_norm_scales(model)
    assert len(scales) == 13
    other = make_optimizer(recipe, model)
    load_optimizer(other, *as_before_the_scales(model, tensors, rest), scales)
    name = "momentum_buffer" if optimizer == "momentum" else "exp_avg"
    for parameter in model.parameters():
        expected = torch.zeros_like(parameter) if parameter in scales else first.state[parameter][name]
        assert torch.equal(other.state[parameter][name], expected)
    other.step()
    with pytest.raises(ValueError, match="other groups of parameters"):
        load_optimizer(other, *as_before_the_scales(model, tensors, rest))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"nesterov": True}, True),
        ({"optimizer": "sgd"}, True),
        ({"optimizer": "sgd", "nesterov": True}, True),
    ],
)
def test_nesterov_momentum(changes, expected):
    optimizer = make_optimizer(tiny(**changes), nn.Linear(2, 2))
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["nesterov"] is expected
