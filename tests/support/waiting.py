"""What must not wait for the GPU is run where waiting is an error."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
