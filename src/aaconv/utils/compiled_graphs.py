"""What torch.compile keeps on the disk, so that the next process does not compile it again."""

from pathlib import Path

import torch._functorch.config as functorch

_SWITCH = "autograd_cache_allow_custom_autograd_functions"


def keeps_all_graphs() -> bool:
    return getattr(functorch, _SWITCH, False)


def keep_all_graphs(on: bool = True) -> None:
    """Keep compiled graphs with an autograd.Function as well, from now on; our layers have some in training. By default
    torch keeps the kernels of such a graph alone, and makes the rest again in every process.

    A graph is looked up by what it computes, both passes of such a function included, so a changed one is compiled
    anew (a test holds it). The switch has no public name but TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD, a
    variable that torch reads when it is imported; where that is set, it has the last word.
    """
    if hasattr(functorch, _SWITCH):
        setattr(functorch, _SWITCH, on)


def forget_fastest_kernels(since: float) -> None:
    """Let torch's compiler time the kernels again that it has timed since then (time.time()); they stay compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for choice in Path(cache_dir()).glob("??/*.best_config"):
        if choice.stat().st_mtime >= since:
            choice.unlink(missing_ok=True)
