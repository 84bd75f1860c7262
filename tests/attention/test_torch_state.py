"""Who must see an operator instead of kernels that are started directly."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aaconv.attention.torch_state import (
    constant_to_compilers,
    is_forward_mode,
    is_transformed,
    someone_looks_on,
)


class Subclass(torch.Tensor):
    pass


def test_plain_tensors_and_parameters_are_nobodys_business():
    assert not someone_looks_on(torch.ones(1), None, torch.nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize("place", [0, 1])
def test_a_subclass_must_see_the_operator(place):
    tensors = [torch.ones(1), torch.ones(1)]
    tensors[place] = tensors[place].as_subclass(Subclass)
    assert someone_looks_on(*tensors)


def test_dispatch_modes_see_the_operator():
    with FlopCounterMode(display=False):
        assert someone_looks_on(torch.ones(1))
    assert not someone_looks_on(torch.ones(1))


def test_function_transforms_see_the_operator():
    seen = []
    torch.func.grad(lambda x: seen.append(someone_looks_on(x)) or x.sum())(torch.ones(2))
    torch.func.vmap(lambda x: seen.append(someone_looks_on(torch.ones(1))) or x)(torch.ones(2))
    assert seen == [True, True]


def test_forward_mode_sees_the_operator():
    assert not is_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert is_forward_mode()
        assert is_transformed()
        assert someone_looks_on(torch.ones(1))
    assert not is_transformed()


def test_compilers_see_the_operator():
    def ask(x):
        return x + int(someone_looks_on(x))

    assert torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1


def test_what_is_constant_to_compilers_is_asked_once():
    asked = []

    @constant_to_compilers
    def answer():
        asked.append(1)  # nothing that could be traced
        return len(asked)

    compiled = torch.compile(lambda x: x + answer(), backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(1)).item() for _ in range(3)] == [1, 1, 1]
    assert answer() > 1
