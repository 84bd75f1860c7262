"""What takes the place of an attention module's forward: the same numbers, without the (HW)^2 tensor."""

import copy
import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Accelerated(ABC):
    """The forward of one attention module, computed by attend_2d or attend_decomposed.

    It stands in the module's `forward` attribute and holds nothing but the module: weights, sizes and switches are read
    from there at every call. Copies and pickles of the module keep it. A call that it cannot do exactly goes to the
    module's own forward.
    """

    operator = "attend_2d"
    """What computes it,"""
    inputs = 1
    """and how many arguments of the module's forward it takes; any other must be None or False."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module  # of a class that is not ours: `fits` has seen its parts
        self.names = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        inputs = [given.pop(name) for name in self.names[: self.inputs] if name in given]
        plain = len(inputs) == self.inputs and all(value is None or value is False for value in given.values())
        if not plain or self.has_dropout() or not self.takes(*inputs):
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.compute(*inputs)

    @classmethod
    @abstractmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether the module has the parts of this family."""

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why a module of this family is left alone, whatever it is called with."""
        return None

    @abstractmethod
    def compute(self, *inputs: Any) -> Any:
        """What the module's own forward returns."""

    def takes(self, *inputs: Any) -> bool:
        """Whether inputs of these shapes are for `compute`; the module's own forward says what is wrong with others."""
        return True

    def dropout(self) -> float:
        """The part of the attention weights that the module drops in training."""
        return 0.0

    def has_dropout(self) -> bool:
        return self.module.training and self.dropout() > 0

    def notes(self) -> list[str]:
        """When the module's own forward runs."""
        return [f"own forward in training: attention dropout {self.dropout():g}"] if self.dropout() > 0 else []

    @property
    def num_heads(self) -> int:
        return self.module.num_heads

    @property
    def depth(self) -> int:
        """Channels of a query and of a key."""
        return self.tables()[0].shape[1]

    def tables(self) -> tuple[Tensor, Tensor]:
        """The module's relative tables, of rows and of columns: [distances, depth]."""
        return self.module.rel_pos_h, self.module.rel_pos_w

    def note_result(self, result: Any) -> None:  # noqa: B027  most families have nothing to learn
        """Learn from what the module's own forward returned how to return it."""

    @abstractmethod
    def stand_ins(self) -> dict[str, nn.Module]:
        """Small parts to try the module with, in place of its own, in float64."""

    @abstractmethod
    def example(self) -> tuple[Any, ...]:
        """Inputs for a module with these parts."""


def resized(table: Tensor, length: int) -> Tensor:
    """A table for maps of another length, in float32 at least: [2*length - 1, depth], interpolated as SAM does."""
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    if table.shape[0] == 2 * length - 1:
        return table
    return F.interpolate(table.T[None], size=2 * length - 1, mode="linear")[0].T


def with_own_parts(module: nn.Module) -> nn.Module:
    """A shallow copy whose parameters, buffers and submodules can be exchanged without touching the module's.

    torch has no public way: they are kept in `_parameters`, `_buffers` and `_modules`, which a copy shares.
    """
    twin = copy.copy(module)
    for kind in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[kind] = dict(getattr(module, kind))
    return twin


def has_parts(module: nn.Module, *names: str) -> bool:
    """Whether the module has submodules of these names."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def has_tables(module: nn.Module | None, *names: str) -> bool:
    """Whether the module has tables [distances, depth] of these names."""
    tables = [getattr(module, name, None) for name in names]
    return all(isinstance(table, Tensor) and table.dim() == 2 for table in tables)


def has_numbers(module: nn.Module | None, *names: str) -> bool:
    """Whether the module has integers of these names."""
    return all(isinstance(getattr(module, name, None), int) for name in names)
