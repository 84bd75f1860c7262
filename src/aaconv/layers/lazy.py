"""Relative tables whose size the first input decides: our seam to the lazy modules of torch.

torch.nn.modules.lazy makes a module lazy in its constructor, by its class; ours is lazy only if no size was given. What
LazyModuleMixin.__init__ does is therefore done here, with its private names: torch.compile and load_state_dict look for
the hooks `_initialize_hook` (of `_infer_parameters`) and `_load_hook` (of `_lazy_load_hook`).
"""

from functools import cache
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

WAY_OUT = (
    "the relative tables are lazy: the first input decides their size; pass size=(height, width) to the layer, call "
    "make_tables(height, width), or run a forward first"
)


class UninitializedTable(UninitializedParameter):
    """A table before its size is known; whoever wants its numbers is told what to do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except ValueError:
            raise ValueError(WAY_OUT) from None


class LazyTables(LazyModuleMixin):
    """Until the first forward: the tables take their size from the map that arrives."""

    def initialize_parameters(self, input: Tensor) -> None:
        if isinstance(input, fx.Proxy):
            raise ValueError(WAY_OUT)
        # A checkpoint may have brought the tables.
        if self.has_uninitialized_params():  # type: ignore[misc]
            self.materialize_tables(self.table_size(input))  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = getattr(self, "__getstate__", lambda: self.__dict__)  # Python 3.10 gives it to no object
        return _unpickled, (self.cls_to_become,), state()


@cache
def _lazy_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Lazy{cls.__name__}", (LazyTables, cls), {"cls_to_become": cls, "__module__": cls.__module__})


def _unpickled(cls: type[nn.Module]) -> nn.Module:
    lazy = _lazy_class(cls)  # type: ignore[arg-type]
    return lazy.__new__(lazy)


def make_lazy(module: Any) -> None:
    """Let the module's first forward, or a checkpoint, decide the size of its tables: module.table_size(input)."""
    module.__class__ = _lazy_class(type(module))  # type: ignore[arg-type]
    module._load_hook = module._register_load_state_dict_pre_hook(module._lazy_load_hook)
    module._initialize_hook = module.register_forward_pre_hook(module._infer_parameters, with_kwargs=True)


def initialize(module: Any, input: Tensor) -> None:
    """What the first forward would do for this input; the module is an ordinary one afterwards."""
    module._infer_parameters(module, (input,))
