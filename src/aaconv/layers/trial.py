"""Try an attention module on a few pixels: attributes alone do not tell what a forward computes."""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import default_backend
from .accelerated import Accelerated, with_own_parts
from .dry_run import copy_without_memory


def why_not(accelerated: Accelerated) -> str | None:
    """None if the module's own forward and the accelerated one give the same, else what happened instead.

    Tried is a stand-in of the module, with random numbers in float64 for weights: so neither its weights nor its
    device and dtype matter, and no random number of the process is used up. What the forward returns besides its
    output is noted in `accelerated`.
    """
    try:
        # Not torch.manual_seed, which would seed the GPUs, too.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad(), default_backend("eager"):
            torch.default_generator.manual_seed(0)
            twin = _stand_in(accelerated)
            mine, inputs = type(accelerated)(twin), accelerated.example()
            theirs = type(twin).forward(twin, *inputs)
            for one in (accelerated, mine):
                one.note_result(theirs)
            ours = mine.compute(*inputs)
    except Exception as error:
        reason = [*str(error).strip().splitlines(), "no message"][0]
        return f"unknown form: on a trial input {type(error).__name__}: {reason}"
    if not _alike(ours, theirs):
        return "unknown form: its own forward gives something else on a trial input"
    return None


def _stand_in(accelerated: Accelerated) -> nn.Module:
    """The module in eval mode, over parts that the family brings, or of the kind of its own."""
    twin = with_own_parts(accelerated.module)
    twin.training = False
    brought = accelerated.stand_ins()
    own = {name: _filled(part) for name, part in twin.named_children() if name not in brought}
    twin._modules.update(own | brought)
    for name, parameter in twin._parameters.items():
        if parameter is not None:
            twin._parameters[name] = nn.Parameter(torch.randn(parameter.shape, dtype=torch.float64))
    return twin


def _filled(part: nn.Module) -> nn.Module:
    """A copy of the part with random numbers."""
    copied, _ = copy_without_memory(part)
    copied = copied.to(torch.float64).to_empty(device="cpu")
    for tensor in (*copied.parameters(), *copied.buffers()):
        tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
    return copied


def _alike(ours: Any, theirs: Any) -> bool:
    """Whether they are the same, where ours has an answer: weights that nobody asked for are not among them."""
    if isinstance(theirs, Tensor):
        # As far apart as a softmax in float32.
        return ours is None or (ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5))
    if isinstance(theirs, tuple | list):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    return ours == theirs
