"""What all loaders have in common: which images a step takes, and where random numbers come from."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..utils.terminal import plural
from .transforms import Normalize


class Loader(ABC):
    """Batches of an epoch on a device; `batch_size` is that of one rank. `aaconv.data.loaders` has the law."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        train: bool,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to world_size - 1, got {rank=}, {world_size=}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if train and len(dataset) < batch_size * world_size:
            there, wanted = plural(len(dataset), "image"), batch_size * world_size
            raise ValueError(f"{there} do not fill one batch of {wanted:,}; lower --batch to at most {len(dataset):,}")
        self.dataset, self.batch_size, self.train, self.seed = dataset, batch_size, train, seed
        self.device, self.rank, self.world_size, self.repeats = torch.device(device), rank, world_size, repeats
        self.normalize = Normalize(dataset.mean, dataset.std, dtype).to(self.device)

    def __len__(self) -> int:
        """The number of steps of an epoch, on this rank."""
        if self.train:
            return len(self.dataset) // (self.batch_size * self.world_size)
        mine = len(range(self.rank, len(self.dataset), self.world_size))
        return -(-mine // self.batch_size)

    @abstractmethod
    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]:
        """The batches of an epoch, from `first_step` on."""

    def _steps(self, epoch: int, first_step: int) -> range:
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= first_step <= len(self):
            raise ValueError(f"first_step must be 0 to {len(self)}, the steps of an epoch, got {first_step}")
        return range(first_step, len(self))

    def _places(self, step: int) -> slice:
        """Where the images of a step stand in the order of its epoch."""
        if self.train:
            start = (step * self.world_size + self.rank) * self.batch_size
            return slice(start, start + self.batch_size)
        start = self.rank + step * self.batch_size * self.world_size
        return slice(start, start + self.batch_size * self.world_size, self.world_size)

    def _order(self, generator: torch.Generator) -> Tensor:
        number = len(self.dataset)
        if not self.train:
            return torch.arange(number)
        return torch.randperm(number, generator=generator).repeat_interleave(self.repeats)[:number]


def mix(*numbers: int) -> int:
    """A seed for torch out of several numbers; neighbours give unrelated ones."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """Within it random numbers on the CPU, torch's, Python's and numpy's, follow from these; afterwards they continue
    as before."""
    seed, python, arrays = mix(*numbers), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reach the GPU's generator as well, which the network uses.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, by way of pinned memory to a GPU; nobody waits for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
