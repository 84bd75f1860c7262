"""The attention branch as one function against its parts, in triton's interpreter: output and every gradient."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from aaconv import AAConv2d
from aaconv.attention import default_backend, triton_backend
from aaconv.layers import at_once, branch
from support.interpreter import run_interpreted

PARTS = 2
interpreted = pytest.mark.skipif(not triton_backend.INTERPRETED, reason="runs in the processes that are started here")
pytestmark = pytest.mark.skipif(not triton_backend.HAS_TRITON, reason="triton is not installed")
CHANGES = ["hook", "global", "forward", "grouped", "empty", "channels first", "float32", "window", "qk_norm", "eager"]
FEW = {"num_heads": 2, "key_channels": 40, "value_channels": 6}


@pytest.mark.slow
@pytest.mark.skipif(triton_backend.INTERPRETED, reason="this is such a process")
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part):
    run_interpreted(__file__, part, PARTS)


@pytest.fixture
def calls(monkeypatch):
    """As if a GPU were there: what attend_at_once returned in every call."""
    returned = []

    def recorded(*arguments):
        returned.append(at_once.attend_at_once(*arguments))
        return returned[-1]

    monkeypatch.setattr(at_once, "on_gpu", lambda x: True)
    monkeypatch.setattr(branch, "attend_at_once", recorded)
    return returned


def result_and_gradients(layer, x, dtype, backend):
    """Of the same weights in another dtype, as float64."""
    copy = AAConv2d.from_conv(nn.Conv2d(16, 32, 3, padding=1, bias=False), size=3, **FEW, attention_bias=True)
    copy.load_state_dict(layer.state_dict())
    copy, leaf = copy.to(dtype), x.to(dtype).to(memory_format=torch.channels_last).requires_grad_()
    with default_backend(backend):
        out = copy(leaf)
    out.square().sum().backward()
    named = {name: weight.grad for name, weight in copy.named_parameters()}
    return {"output": out.detach(), "input": leaf.grad, **named}


@interpreted
def test_output_and_gradients_are_as_near_to_float64_as_those_of_the_parts(calls):
    torch.manual_seed(0)
    layer = AAConv2d(16, 32, 3, size=3, bias=False, **FEW, attention_bias=True)
    x = torch.randn(2, 16, 3, 3)
    fused = result_and_gradients(layer, x, torch.float16, "triton")
    assert [result is not None for result in calls] == [True]
    parts = result_and_gradients(layer, x, torch.float16, "eager")
    exact = result_and_gradients(layer, x, torch.float64, "eager")
    assert [result is not None for result in calls] == [True, False, False]
    assert fused.keys() == exact.keys() == {"output", "input", *dict(layer.named_parameters())}
    for name, truth in exact.items():
        assert fused[name].dtype == torch.float16
        error, allowed = ((one[name].double() - truth).abs().max() for one in (fused, parts))
        assert error <= 2 * allowed + 1e-3 * truth.abs().max(), name


@interpreted
def test_without_gradients_the_result_is_the_same(calls):
    layer = AAConv2d(16, 32, 3, size=3, bias=False, **FEW).half()
    x = torch.randn(1, 16, 3, 3).half().to(memory_format=torch.channels_last)
    expected = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    assert all(result is not None for result in calls)


@interpreted
def test_what_needs_no_gradient_gets_none(calls):
    layer = AAConv2d(16, 32, 3, size=3, bias=False, **FEW, attention_bias=True).half()
    layer.requires_grad_(False)
    layer.rel_h.requires_grad_(True)
    layer(torch.randn(1, 16, 3, 3).half().to(memory_format=torch.channels_last)).sum().backward()
    assert {name for name, weight in layer.named_parameters() if weight.grad is not None} == {"rel_h"}
    assert calls[0] is not None


@interpreted
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_can_be_differentiated_again(checkpointed, calls):
    torch.manual_seed(0)
    layer = AAConv2d(16, 32, 3, size=2, bias=False, **FEW, attention_bias=True).half()
    x = torch.randn(1, 16, 2, 3).half().to(memory_format=torch.channels_last).requires_grad_()
    second = []
    for backend in ("triton", "eager"):
        with default_backend(backend):
            out = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            (first,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
            leaves = [x, *layer.parameters()]
            second.append(torch.autograd.grad(first.float().square().sum(), leaves, allow_unused=True))
    taken = [result is not None for result in calls]
    assert (taken[0], taken[-1], taken) == (True, False, sorted(taken, reverse=True))
    for ours, theirs in zip(*second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


@interpreted
@pytest.mark.parametrize("change", CHANGES)
def test_done_part_by_part_where_it_must_be(change, calls):
    options = {"window": {"window": 3}, "qk_norm": {"qk_norm": True, "size": 3}}.get(change, {"size": 3})
    layer = AAConv2d(16, 32, 3, bias=False, **FEW, **options, backend="eager" if change == "eager" else None).half()
    x = torch.randn(0 if change == "empty" else 1, 16, 3, 3).half()
    seen = []
    if change == "hook":
        layer.qkv.register_forward_hook(lambda *_: seen.append("hook"))
    if change == "grouped":
        layer.project = nn.Conv2d(6, 6, 1, groups=2, bias=False).half()
    if change == "forward":
        forward = layer.project.forward
        layer.project.forward = lambda x: seen.append("forward") or forward(x)
    if change != "channels first":
        x = x.to(memory_format=torch.channels_last)
    if change == "float32":
        layer, x = layer.float(), x.float()
    with torch.no_grad(), every_module_watched(seen, layer.project) if change == "global" else nullcontext():
        assert layer(x).shape == (len(x), 32, 3, 3)
    assert not any(result is not None for result in calls)
    assert seen == ([change] if change in ("hook", "global", "forward") else [])


@contextmanager
def every_module_watched(seen, module):
    """Notes in `seen` that a hook of all modules was called for this one."""
    handle = register_module_forward_hook(lambda called, *_: seen.append("global") if called is module else None)
    yield
    handle.remove()
