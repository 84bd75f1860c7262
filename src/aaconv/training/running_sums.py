"""Sums over the steps of an epoch, kept on the device: nobody waits for a GPU to know how training goes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..utils.distributed import World, total
from ..utils.numbers import is_whole


class RunningSums:
    """The sums of the loss and of some metrics, and how many parts went by before the loss was not finite."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.parts = 0
        self._sums = torch.zeros(2 + len(names), dtype=torch.float64, device=device)
        self._copy: tuple[Tensor, torch.cuda.Event, int] | None = None

    def add(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Scalars on the device; they are not read."""
        self.parts += 1
        values = torch.stack([loss.detach().float(), *(metrics[name].detach().float() for name in self.names)])
        self._sums[1:] += values
        # A sum that is not finite stays so: this counts the parts before it.
        self._sums[0] += self._sums[1].isfinite()

    def means(self, processes: int = 1) -> list[float]:
        """The loss, then the metrics in their order, over as many processes; waits for the device."""
        sums = total(self._sums[1:].clone()) if processes > 1 else self._sums[1:]
        return [value / max(1, self.parts * processes) for value in sums.tolist()]

    def first_bad(self) -> int | None:
        """The first part, counted from 0, after which the loss was not finite; waits for the device."""
        finite = int(self._sums[0])
        return finite if finite < self.parts else None

    def ask(self) -> None:
        """Have the sums copied to the host when the device gets there."""
        if self._sums.is_cuda and self._copy is None:
            copy = torch.empty(self._sums.shape, dtype=self._sums.dtype, pin_memory=True)
            copy.copy_(self._sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copy = copy, event, self.parts

    def answer(self) -> tuple[list[float], bool, int] | None:
        """What was asked for, if it has arrived: the means, are they finite, and after how many parts."""
        if not self._sums.is_cuda:
            return self.means(), self.first_bad() is None, self.parts
        if self._copy is None or not self._copy[1].query():
            return None
        (finite, *sums), parts = self._copy[0].tolist(), self._copy[2]
        self._copy = None
        return [value / max(1, parts) for value in sums], finite == parts, parts

    def state(self) -> dict[str, Any]:
        return {"parts": self.parts, "sums": self._sums.tolist()}

    def load(self, states: list[dict[str, Any]], world: World) -> None:
        """Take back what each process had; where there were more or fewer of them, all get the mean."""
        sums = torch.tensor([state["sums"] for state in states], dtype=torch.float64)
        parts = states[0]["parts"]
        if sums.shape != (len(states), len(self._sums)) or not is_whole(parts) or parts < 0:
            raise ValueError(f"its sums are not those of {len(self.names)} metrics")
        if not sums.isfinite().all():
            raise ValueError("its sums are not finite")
        self.parts = parts
        self._sums.copy_(sums[world.rank] if len(states) == world.size else sums.mean(0))
