"""Models without memory: built and run over meta tensors, which have a shape and a dtype and nothing else."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.overrides import TorchFunctionMode


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` returns, over meta tensors; as it is where its constructor reads values, which those do not have."""
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        return make()


def copy_without_memory(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """A copy of the model over meta tensors, in eval mode, and what stands in it for each object, by id.

    Compiled parts are copied as they were before. Whatever a forward keeps in its modules is then kept in the copy, and
    not in the model.
    """
    plain = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    copied: dict[int, Any] = {
        id(tensor): _without_memory(tensor) for tensor in (*model.parameters(), *model.buffers(), *plain)
    }
    twin = uncompiled(copy.deepcopy(model, copied)).eval()
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if uncompiled(child) is not child:
                setattr(module, name, uncompiled(child))
    return twin, copied


def run(copied: nn.Module, *inputs: Tensor) -> Any:
    """The forward of such a copy for inputs of these shapes and dtypes, wherever they are."""
    with torch.no_grad(), _MetaWins():
        return copied(*(_without_memory(x) for x in inputs))


def uncompiled(model: nn.Module) -> nn.Module:
    """What torch.compile wraps, or the model itself: compiled code cannot run over meta tensors.

    torch has no public way to ask; what it wraps is `_orig_mod`, as the names in the state dict show.
    """
    return getattr(model, "_orig_mod", model)


def _without_memory(tensor: Tensor) -> Tensor:
    if is_lazy(tensor):
        return UninitializedParameter(device="meta", dtype=tensor.dtype)  # type: ignore[call-arg]
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


class _MetaWins(TorchFunctionMode):
    """Where a meta tensor meets others, such as a constant that a forward makes, they become meta tensors, too."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len({tensor.is_meta for tensor in _tensors_in((args, kwargs))}) == 2:
            args, kwargs = _all_meta(args), _all_meta(kwargs)
        return func(*args, **kwargs)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def _all_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _all_meta(part) for name, part in value.items()}
    return type(value)(map(_all_meta, value)) if isinstance(value, list | tuple) else value
