"""What torch's compiler does at the moment."""

import torch


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """torch.compiler.is_exporting(), asked before anything is traced: to the compiler of torch 2.11 every compilation
    is an export."""
    return torch.compiler.is_exporting()
