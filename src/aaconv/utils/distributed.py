"""Many processes as one: `torchrun --nproc-per-node N -m aaconv train ...` starts them, `World` is what they share.

Tensors of the network travel by nccl on GPUs and gloo on CPUs. What the processes tell each other besides, a stop
or the state that a run resumes from, travels by gloo in a group of its own: no GPU has to wait for it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from .device import pick_device

TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others: as long as the slowest evaluation or checkpoint may take."""

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class World:
    """The processes of a run; one that was started alone is `World(device)`."""

    device: torch.device
    rank: int = 0
    size: int = 1
    control: Any = None

    @property
    def is_main(self) -> bool:
        """Does this process write the files and the display?"""
        return self.rank == 0

    def highest(self, number: int) -> int:
        """The largest of the numbers that the processes name; all have to ask."""
        return self._agree(number, dist.ReduceOp.MAX)

    def lowest(self, number: int) -> int:
        return self._agree(number, dist.ReduceOp.MIN)

    def _agree(self, number: int, by: Any) -> int:
        if self.size == 1:
            return number
        with communicating():
            tensor = torch.tensor(int(number))
            dist.all_reduce(tensor, by, group=self.control)
        return int(tensor)

    def leave(self, number: int) -> None:
        """A last word before an error ends this process: what `highest` gives to those who ask in the next seconds."""
        if self.size == 1:
            return
        try:
            sent = dist.all_reduce(torch.tensor(number), dist.ReduceOp.MAX, group=self.control, async_op=True)
            sent.wait(timedelta(seconds=5))
        except RuntimeError:
            pass  # the others are gone, or are somewhere else

    def share(self, thing: Shared | None) -> Shared:
        """What the first process has, in all of them."""
        if self.size == 1:
            return cast(Shared, thing)
        things = [thing]
        with communicating():
            dist.broadcast_object_list(things, src=0, group=self.control)
        return cast(Shared, things[0])

    def on_main(self, function: Callable[[], Shared]) -> Shared:
        """Call it in the main process alone and give all what it gives; its error ends all, and one reports it."""
        outcome: tuple[Any, Exception | None] | None = None
        if self.is_main:
            try:
                outcome = function(), None
            except (ValueError, OSError) as error:
                outcome = None, error
        result, failed = self.share(outcome)
        if failed is not None:
            raise failed if self.is_main else SystemExit(2)
        return result

    def gather(self, thing: Shared) -> list[Shared]:
        """What each process has, by rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        with communicating():
            dist.all_gather_object(things, thing, group=self.control)
        return things

    def wrap(self, model: nn.Module) -> nn.Module:
        """The network as it is trained: gradients are averaged over the processes."""
        if self.size == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        with communicating():
            return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def prepare(self, model: nn.Module, *, sync_batch_norm: bool) -> nn.Module:
        """The same network, with the statistics of its batch norms taken over all processes if that is wanted."""
        if not sync_batch_norm or self.size == 1:
            return model
        if self.device.type != "cuda":
            raise ValueError("sync_batch_norm needs GPUs: torch has no synchronised batch norm for CPUs")
        return convert_sync_batchnorm(model)

    def gradients(self, net: nn.Module, *, travel: bool) -> AbstractContextManager:
        """Within it backward averages the gradients over the processes, or, for all but the last part, does not."""
        return net.no_sync() if isinstance(net, DistributedDataParallel) and not travel else nullcontext()

    def same_buffers(self, model: nn.Module) -> None:
        """The running statistics of the first process, in all of them."""
        if self.size > 1:
            with communicating():
                for buffer in model.buffers():
                    dist.broadcast(buffer, src=0)


def total(tensor: Tensor) -> Tensor:
    """The sum over all processes; the tensor itself where there is one."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with communicating():
            dist.all_reduce(tensor)
    return tensor


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Has torchrun started this process again, after one had failed?"""
    return started_by_torchrun() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


@contextmanager
def joined(device: str | None = None) -> Iterator[World]:
    """Join the processes that torchrun started together with this one, if it did."""
    where = pick_device(device)
    if not started_by_torchrun():
        yield World(where)
        return
    if where.type == "cuda":
        local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= there:
            raise ValueError(f"this machine has {there} GPUs, process {local} finds none; lower --nproc-per-node")
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
    with communicating():
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=_of_this_attempt(store), rank=rank, world_size=size, timeout=TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    try:
        yield World(where, rank, size, control)
    except SystemExit:
        dist.destroy_process_group()
        raise
    # Not after an error: it would wait for processes that may not answer any more.
    dist.destroy_process_group()


def _of_this_attempt(store: dist.Store) -> dist.Store:
    """Restarted processes must not find the addresses of those before them.

    torchrun keeps one store for all attempts where it was given a port (--master-port, or none at all). Machines may
    count differently, but with several of them --rdzv-backend c10d is what restarts, and that has a store an attempt.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return store
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


@contextmanager
def communicating() -> Iterator[None]:
    """What goes wrong between the processes becomes one line."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            raise ConnectionError(
                f"the connection to the other processes is lost: {str(error).splitlines()[0]}"
            ) from error
        raise
