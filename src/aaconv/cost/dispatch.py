"""TorchDispatchMode: sees every operation that torch runs, below autograd, with its arguments and its result.

torch gives it no public name: it is in torch.utils._python_dispatch. FlopCounterMode, which is public and uses it, can
neither tell the layer of an operation that fails nor skip those that take long.
"""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
