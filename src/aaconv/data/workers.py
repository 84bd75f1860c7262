"""Samples made one by one in other processes, a few batches ahead: the loop that both tasks share."""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..utils.device import cores
from .base_loader import Loader, drawing_from, mix, to_device
from .images import MAX_UNREADABLE, Skipped, UnreadableImage

Key = tuple[int, int, int]
"""(index in the data set, epoch, place in the epoch's order)."""
Part = tuple[tuple[Tensor, ...] | None, list[Exception]]
"""The collated tensors of a batch, None without any, and what could not be made."""
Sample = TypeVar("Sample")
KILLED = "DataLoader worker (pid"
"""How torch's error begins where a worker has died; other errors of a worker begin otherwise."""


class Samples(ABC, Generic[Sample]):
    """What a worker does with an image: `make` reads and transforms it, `stack` joins those of a batch."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    @abstractmethod
    def make(self, index: int) -> Sample:
        """Torch's random numbers follow from the seed, the epoch and the place, whichever process this runs in."""

    @abstractmethod
    def stack(self, samples: list[Sample]) -> tuple[Tensor, ...]:
        """The tensors of a batch, images first: few, since each takes a file descriptor on its way."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Sample | Exception:
        index, epoch, place = key
        try:
            with drawing_from(self.seed, epoch, place):
                return self.make(index)
        except (UnreadableImage, ValueError, OSError) as error:
            return error  # across processes an error that is raised brings its whole traceback as text

    def collate(self, samples: list[Sample | Exception]) -> Part:
        good = [sample for sample in samples if not isinstance(sample, Exception)]
        return (self.stack(good) if good else None), [one for one in samples if isinstance(one, Exception)]

    def loader(
        self, batches: Iterable[list[Key]], workers: int, *, device: torch.device | None = None, prefetch: int = 4
    ) -> DataLoader:
        """torch's loader of these batches; with a device it serves many epochs, and pins what goes to a GPU."""
        if workers < 0:
            raise ValueError(f"workers must be at least 0, got {workers}")
        workers = min(workers, cores())
        return DataLoader(
            self,  # type: ignore[arg-type]
            batch_sampler=batches,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0 and device is not None,
            collate_fn=self.collate,
            pin_memory=device is not None and device.type == "cuda",
            # Its own generator: the one of the training loop must not depend on how often a loader was started.
            generator=torch.Generator(),
        )


class Transformed(Samples[tuple[Tensor, int]]):
    """Images of a labelled data set behind a transform: (images, labels int64)."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Tensor], seed: int = 0) -> None:
        super().__init__(dataset, seed)
        self.transform = transform

    def make(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        return self.transform(image), label

    def stack(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, ...]:
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels)


def skip(failed: list[Exception], skipped: Skipped) -> None:
    """Report unreadable images; any other error of a worker is raised here, as it was there."""
    for error in failed:
        if not isinstance(error, UnreadableImage):
            raise error
        skipped.add(error)


class _BatchKeys:
    """What is delivered at the moment: for each batch the keys of its images."""

    of_epoch: Iterator[list[Key]] = iter(())

    def __iter__(self) -> Iterator[list[Key]]:
        return self.of_epoch


class SampleLoader(Loader):
    """Images made by `samples` in `workers` processes (0: in this one), a few batches ahead.

    They travel as uint8, by way of pinned memory to a GPU, and are normalised there. Unreadable images are reported to
    `skipped`: evaluation leaves them out; in training others of the batch take their places, so that its size stays.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        samples: Callable[[int], Samples],
        workers: int = 4,
        prefetch: int = 4,
        max_unreadable: int = MAX_UNREADABLE,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size, **options)
        self.skipped = Skipped(max_unreadable)
        self._keys = _BatchKeys()
        self._loader = samples(self.seed).loader(self._keys, workers, device=self.device, prefetch=prefetch)

    @abstractmethod
    def pack(self, images: Tensor, *others: Tensor) -> Any:
        """A batch out of its normalised images and the other tensors of its samples, on the device."""

    def batches(self, epoch: int = 0, first_step: int = 0) -> Iterator[Any]:
        return self._deliver(epoch, self._steps(epoch, first_step))

    def _deliver(self, epoch: int, steps: range) -> Iterator[Any]:
        order = self._order(torch.Generator().manual_seed(mix(self.seed, epoch))).tolist()
        places = range(len(order))
        keys = ([(order[place], epoch, place) for place in places[self._places(step)]] for step in steps)
        self._keys.of_epoch = keys
        for step, (tensors, failed) in zip(steps, self._loader, strict=True):
            skip(failed, self.skipped)
            if tensors is None:
                if self.train:
                    first = failed[0].name
                    raise OSError(f"no image of epoch {epoch}, step {step} can be read; the first is {first}")
                continue
            if self.train and failed:
                filled = torch.arange(self.batch_size) % len(tensors[0])
                tensors = tuple(tensor[filled] for tensor in tensors)
            images, *others = (to_device(tensor, self.device) for tensor in tensors)
            yield self.pack(self.normalize(images), *others)
            if self._keys.of_epoch is not keys:
                raise RuntimeError("another epoch of this loader was begun: it can deliver one at a time")


@contextmanager
def naming_killed_workers(way_out: Callable[[], str]) -> Iterator[None]:
    """A worker that the system has killed is a ChildProcessError with the way out, wherever torch notices it."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        reason = str(error) if isinstance(error, RuntimeError) else "its pipe has ended"
        try:
            time.sleep(0.2)  # the handler of the signal may raise after a pipe has ended: here, not during the report
        except RuntimeError as signalled:
            reason = str(signalled)  # it names the worker and the signal
        if not _is_of_a_dead_worker(error):
            raise
        reason = " ".join(reason.split()).partition(". ")[0].rstrip(".")
        raise ChildProcessError(
            f"a data worker has died, most often because memory ran out ({reason}); {way_out()}"
        ) from error


def _is_of_a_dead_worker(error: Exception) -> bool:
    """torch notices a dead worker by its signal or, where the main process reads from it, by a pipe that ends."""
    if isinstance(error, RuntimeError):
        return KILLED in str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parts[-2:] == ("multiprocessing", "connection.py") for frame in frames)
