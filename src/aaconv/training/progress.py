"""What a training run shows while it runs: two lines that are rewritten on a terminal, plain lines elsewhere.

    with Display(recipe, steps_per_epoch) as display:
        ...
        if display.due():
            display.step(epoch, step, loss=0.41, accuracy=81.3, lr=0.1, images=12_800)
        display.epoch(row)  # of metrics.csv

Other places can follow as well, TensorBoard is one: `with following(TensorBoard(folder)): train(...)`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..recipes.recipe import Recipe
from ..utils.metrics import TITLES, metric_title, says_nothing

ON_TERMINAL, ELSEWHERE = 0.2, 10.0  # seconds between two updates
RECENT = 20.0  # seconds over which the speed is averaged
SHOWN = {"train_loss": "train loss", "train_top1": "", "loss": "loss"}
SHOWN |= {name: metric_title(name) for name in ("top1", "top5", "mAP", "mAP50")}
"""Columns of metrics.csv and what they are called in the line of an epoch."""
PERCENT = ("train_top1", *TITLES)


class Follower(Protocol):
    """Something that follows how a run goes."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """`step` is counted from the beginning of the run."""

    def epoch(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


_followers: list[Follower] = []


@contextmanager
def following(*followers: Follower) -> Iterator[None]:
    """All displays tell these followers, too, until the block ends."""
    before = list(_followers)
    _followers.extend(followers)
    try:
        yield
    finally:
        _followers[:] = before
        for follower in followers:
            follower.close()


class TensorBoard:
    """A follower that writes event files into `folder`; needs the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("--tensorboard needs the package tensorboard: pip install 'aaconv[tensorboard]'") from None
        self._make, self._folder = SummaryWriter, str(folder)

    @cached_property
    def _writer(self) -> Any:
        """Made when there is something to write: a run that cannot begin leaves no folder."""
        return self._make(self._folder)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"step/{name}", value, step)

    def epoch(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in ("epoch", "step") and _is_number(value):
                self._writer.add_scalar(f"epoch/{name}", float(value), int(row.get("step", row["epoch"])))

    def close(self) -> None:
        if "_writer" in vars(self):
            self._writer.close()


class Display:
    """The live display of one run. `first` is the (epoch, step) that training starts at; both count from 0."""

    def __init__(
        self, recipe: Recipe, steps_per_epoch: int, first: tuple[int, int] = (0, 0), *, console: Console | None = None
    ) -> None:
        self._recipe, self._per_epoch = recipe, steps_per_epoch
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._on_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._on_terminal else None
        self._clock = Clock(first[0] * steps_per_epoch + first[1], recipe.epochs * steps_per_epoch)
        self._updated = float("-inf")

    @staticmethod
    def silent() -> Display:
        """A display that does nothing."""
        return _Silent()

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        self._updated = time.monotonic() if not self._on_terminal else self._updated
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def due(self) -> bool:
        """Is it time for an update? A few times a second on a terminal, every ten seconds elsewhere."""
        return time.monotonic() - self._updated >= (ON_TERMINAL if self._on_terminal else ELSEWHERE)

    def step(
        self, epoch: int, step: int, *, loss: float, lr: float, images: int, accuracy: float | None = None
    ) -> None:
        """`step` steps of the epoch (counted from 0) are done, `images` were seen by this process; accuracy in %."""
        self._updated = time.monotonic()
        done = epoch * self._per_epoch + step
        self._clock.tick(done, images)
        values = {"loss": loss, "lr": lr} | ({} if accuracy is None else {"accuracy": accuracy})
        for follower in _followers:
            follower.step(done, values)
        if self._live:
            self._live.update(self._two_lines(epoch, step, done, values), refresh=True)
        else:
            accuracy_text = "" if accuracy is None else f"  {accuracy:.1f} %"
            self._print(
                f"  epoch {epoch + 1}/{self._recipe.epochs} step {step}/{self._per_epoch}"
                f"  loss {loss:.3f}{accuracy_text}  lr {lr:.3g}{self._speed()}{self._left()}"
            )

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is finished: its row of metrics.csv stays on the screen as a line."""
        for follower in _followers:
            follower.epoch(row)
        self._clock.pause()
        width = len(str(self._recipe.epochs))
        text = Text.assemble((f"epoch {int(row['epoch']):{width}}/{self._recipe.epochs} ", "bold"))
        for name, title in SHOWN.items():
            if _is_number(row.get(name)) and not says_nothing(name, float(row[name])):
                value = float(row[name])
                important = name in ("top1", "mAP")
                text.append(f" {title} " if title else "", None if important else "dim")
                text.append(
                    f"{value:.1f} %" if name in PERCENT else f"{value:.3f}", "bold green" if important else None
                )
                text.append(" ")
        text.rstrip()
        self._print(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._print(Text(text))

    def _two_lines(self, epoch: int, step: int, done: int, values: Mapping[str, float]) -> Group:
        bar = ProgressBar(self._recipe.epochs * self._per_epoch, done, complete_style="cyan", finished_style="cyan")
        first = Table.grid(padding=(0, 2), expand=True)
        first.add_column(no_wrap=True)
        first.add_column(ratio=1)
        first.add_column(no_wrap=True, justify="right")
        first.add_row(
            Text(f"epoch {epoch + 1}/{self._recipe.epochs}", "bold"),
            bar,
            Text(f"step {step}/{self._per_epoch}{self._left()}"),
        )
        numbers = Text("  ").join(
            Text.assemble((f"{name} ", "dim"), value)
            for name, value in (
                ("loss", f"{values['loss']:.3f}"),
                ("accuracy", f"{values['accuracy']:.1f} %" if "accuracy" in values else ""),
                ("learning rate", f"{values['lr']:.3g}"),
            )
            if value
        )
        return Group(first, numbers + Text(self._speed()))

    def _speed(self) -> str:
        rate = self._clock.images_per_second()
        return "" if rate is None else f"  {rate:,.0f} images/s" if rate >= 10 else f"  {rate:.1f} images/s"

    def _left(self) -> str:
        seconds = self._clock.seconds_left()
        return "" if seconds is None else f"  {duration(seconds)} left"

    def _print(self, text: str | Text) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
        self._console.file.flush()


class _Silent(Display):
    def __init__(self) -> None:
        pass

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def due(self) -> bool:
        return False

    def step(self, *_: Any, **__: Any) -> None:
        pass

    def epoch(self, row: Mapping[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class Clock:
    """The speed over the last seconds, and the time left at the speed of the whole process, evaluations included."""

    def __init__(self, first: int, total: int) -> None:
        self._total = total
        self._begun: tuple[float, int] | None = None  # when the first update came: compiling does not count
        self._recent: deque[tuple[float, int]] = deque()
        self._now, self._done = 0.0, first

    def tick(self, done: int, images: int) -> None:
        """`done` steps of the run are done, `images` were seen by this process so far."""
        self._now, self._done = time.monotonic(), done
        self._begun = self._begun or (self._now, done)
        self._recent.append((self._now, images))
        while len(self._recent) > 2 and self._now - self._recent[0][0] > RECENT:
            self._recent.popleft()

    def pause(self) -> None:
        """What comes now, an evaluation, is not part of the speed."""
        self._recent.clear()

    def images_per_second(self) -> float | None:
        if len(self._recent) < 2:
            return None
        (start, before), (end, now) = self._recent[0], self._recent[-1]
        return (now - before) / max(end - start, 1e-9)

    def seconds_left(self) -> float | None:
        if self._begun is None or self._done <= self._begun[1]:
            return None
        return (self._now - self._begun[0]) / (self._done - self._begun[1]) * (self._total - self._done)


def duration(seconds: float) -> str:
    """0:07, 12:34, 3:25:07, 2 d 03 h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
