"""The sdpa form on the CPU has every derivative that eager has: second ones, forward mode, and torch.func's."""

from functools import partial

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from aaconv.attention import attend_2d
from support.reference import random_inputs

# torch's own, where it differentiates in forward mode
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")

SIZES = {"num_heads": 2, "key_channels": 4}


@pytest.fixture(params=["shared", "per-head", "none"])
def tables(request):
    return request.param


def functions_and_inputs(tables, batch=2, height=2, width=3, value_depth=2):
    """eager, sdpa, and leaves for both; their values are narrower than their extended keys, as always."""
    inputs = random_inputs(batch, height, width, num_heads=2, key_depth=2, value_depth=value_depth, tables=tables)
    given = [part for part in inputs if part is not None]

    def attend(*parts, backend):
        return attend_2d(*parts, *[None] * (3 - len(parts)), **SIZES, backend=backend)

    return partial(attend, backend="eager"), partial(attend, backend="sdpa"), given


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("value_depth", [1, 2, 9])
def test_gradients_of_gradients(tables, value_depth):
    eager, sdpa, inputs = functions_and_inputs(tables, value_depth=value_depth)

    def penalty(function):
        gradients = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs)

    assert_same(penalty(sdpa), penalty(eager))


def test_numerical_derivatives_of_every_order(tables):
    _, sdpa, inputs = functions_and_inputs(tables, batch=1)
    assert torch.autograd.gradcheck(sdpa, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(sdpa, inputs)


def test_forward_mode(tables):
    eager, sdpa, inputs = functions_and_inputs(tables)
    inputs = tuple(part.detach() for part in inputs)
    tangents = tuple(torch.randn_like(part) for part in inputs)
    assert_same(jvp(sdpa, inputs, tangents), jvp(eager, inputs, tangents))
    some = jvp(lambda qkv: sdpa(qkv, *inputs[1:]), inputs[:1], tangents[:1])
    assert_same(some, jvp(lambda qkv: eager(qkv, *inputs[1:]), inputs[:1], tangents[:1]))


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=lambda transform: transform.__name__)
def test_jacobians_and_hessians(tables, transform):
    eager, sdpa, inputs = functions_and_inputs(tables, batch=1)
    qkv, *rest = (part.detach() for part in inputs)

    def of(function):
        return transform(lambda x: function(x, *rest).square().sum())(qkv)

    assert_same(of(sdpa), of(eager))


def test_gradients_of_every_image(tables):
    eager, sdpa, inputs = functions_and_inputs(tables, batch=3)
    qkv, *rest = (part.detach() for part in inputs)

    def of(function):
        loss = lambda image, *rest: function(image[None], *rest).square().sum()  # noqa: E731
        return vmap(grad(loss, argnums=tuple(range(len(inputs)))), in_dims=(0, *[None] * len(rest)))(qkv, *rest)

    assert_same(of(sdpa), of(eager))


def test_a_batch_of_batches_is_mapped_without_a_loop():
    """torch would warn that its kernel cannot be mapped; and gradients flow through the mapped call."""
    _, sdpa, (qkv, *rest) = functions_and_inputs("shared", batch=6)
    mapped = vmap(sdpa, in_dims=(1, None, None))(qkv.unflatten(0, (2, 3)), *rest)
    assert_same(mapped.transpose(0, 1).flatten(0, 1), sdpa(qkv, *rest))
    expected = torch.autograd.grad(sdpa(qkv, *rest).square().sum(), [qkv, *rest])
    assert_same(torch.autograd.grad(mapped.square().sum(), [qkv, *rest]), expected)


def test_the_result_keeps_no_padding_alive():
    _, sdpa, inputs = functions_and_inputs("shared", height=4, width=5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        sdpa(*inputs)
    result = kept[-1]
    assert result.shape == (2, 2, 20, 2)
    assert result.untyped_storage().nbytes() == result.nbytes


def test_float32_has_derivatives_of_its_own_as_well():
    """torch's kernel for the CPU has no second ones."""
    eager, sdpa, inputs = functions_and_inputs("shared")
    inputs = [part.detach().float().requires_grad_() for part in inputs]

    def second(function):
        (first,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), inputs)

    torch.testing.assert_close(second(sdpa), second(eager), rtol=1e-4, atol=1e-5)
