"""What torch is doing at the moment, asked through names that it does not document.

The fused kernels are started directly where nobody looks on, because what torch wraps around an operator of one's own
takes longer than the kernels. Whoever does look on (compilers, exports, dispatch modes such as FlopCounterMode,
torch.func, tensor subclasses) must see one operator instead.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable)


def constant_to_compilers(function: Function) -> Function:
    """torch.compiler.assume_constant_result, which imports torch's whole compiler for this one attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def someone_looks_on(*tensors: Tensor | None) -> bool:
    """Whether operations on these tensors must pass torch's dispatcher."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or is_transformed()
        or torch.jit.is_tracing()
        or any(tensor is not None and type(tensor) not in _PLAIN for tensor in tensors)
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work, which know nothing of our kernels:
    they refuse some, and take the tangent of others for zero."""
    return not torch.compiler.is_compiling() and is_in_transform()


@constant_to_compilers
def is_in_transform() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work; for a compiler, whether it compiles
    one."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Whether there may be tensors with tangents."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def is_one_of_many(grad: Tensor) -> bool:
    """Whether it stands for many gradients (torch.autograd.grad with is_grads_batched), which have no address."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def is_captured(x: Tensor) -> bool:
    """Whether work on this tensor goes into a CUDA graph that is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def stream_of(x: Tensor) -> int | None:
    """The CUDA stream that work on this tensor is queued in; None on the CPU. Memory that is kept from call to call
    belongs to one: another would not wait until it is written, nor keep it from being given away."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None


def modules_are_watched() -> bool:
    """Whether there are hooks for every module (torch.nn.modules.module.register_module_forward_hook and the like)."""
    return torch.nn.modules.module._has_any_global_hook()


_PLAIN = (Tensor, torch.nn.Parameter)
