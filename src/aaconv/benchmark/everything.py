"""`aaconv bench all`: the benchmarks of docs/benchmarks.md that need a GPU, a JSON file each, all of one commit; the
user's own loop of examples/compare_speed.py among them.

What is there already, of the same command, commit, versions and GPU, is not measured again, so the same line goes on
where it was stopped. Compiling takes longer than measuring. So the commands may run side by side first, a network and a
phase each where they name their networks, what they measure thrown away: torch and triton keep what they compile on
the disk.
"""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..utils.compiled_graphs import forget_fastest_kernels
from ..utils.environment import environment
from ..utils.files import check_writable, naming_unwritable
from ..utils.json_file import read_json
from .attention import PAPER_SHAPES, WIDE_SHAPES
from .output import Progress

PAPER_HEADS, WIDE_HEADS = (" ".join(map(str, shapes)) for shapes in (PAPER_SHAPES, WIDE_SHAPES))
WINDOWS = " ".join(
    f"32:{side}x{side}:{heads}@{k}" for side in (56, 112) for heads in ("20/3", "32/32") for k in (7, 13)
)
LOOP = "examples/compare_speed.py"
LOOP_COMPILED = f"{LOOP} --models resnet50 aa_resnet50"
TRAIN = "train --rounds 3 --images 25600"
COMMANDS = {
    "attention-three-{gpu}": "attention --rounds 3 --variants triton compiled --shapes "
    "8:40x40:20/3 128:14x14:20/3 128:32x32:20/2",
    "loop-{gpu}": LOOP,
    "loop-batch1-graphs-{gpu}": f"{LOOP_COMPILED} --modes graphs --batch 1 --phases inference",
    "resnet50-{gpu}": "model --models plain_resnet50 se_resnet50 aa_resnet50 --rounds 4",
    "loop-graphs-{gpu}": f"{LOOP_COMPILED} --modes graphs",
    "loop-compiled-{gpu}": f"{LOOP_COMPILED} --modes compile",
    "wrn28_10-{gpu}": "model --models plain_wrn28_10 aa_wrn28_10 --batch 256 --size 32 --train --rounds 4",
    "loop-small-{gpu}": f"{LOOP} --batch 1 8 --phases inference",
    "resnet50-batch1-{gpu}": "model --models plain_resnet50 se_resnet50 aa_resnet50 --batch 1 --infer --rounds 4",
    "train-{gpu}": TRAIN,
    "train-graphs-{gpu}": f"{TRAIN} --compile reduce-overhead",
    "train-aa-{gpu}": f"{TRAIN} --model aa_wrn28_10",
    "train-aa-graphs-{gpu}": f"{TRAIN} --model aa_wrn28_10 --compile reduce-overhead",
    "train-160-{gpu}": "train --rounds 3 --images 9600 --model aa_resnet50 --size 160 --batch 128 "
    "--compile reduce-overhead",
    "attention-windows-{gpu}": f"attention --rounds 2 --variants triton flex --shapes {WINDOWS}",
    "resnet50-windows-{gpu}": "model --models plain_resnet50 aa_window_resnet50 aa_window_resnet50:num_heads=8 "
    "--rounds 4",
    "resnet50-160-{gpu}": "model --models plain_resnet50 aa_resnet50 aa_window_resnet50:window=7,num_heads=8 "
    "aa_window_resnet50:num_heads=8 aa_window_resnet50 --train --size 160 --rounds 4",
    "attention-{gpu}": f"attention --rounds 3 --variants triton compiled flex --shapes {PAPER_HEADS}",
    "attention-wide-{gpu}": f"attention --rounds 4 --variants triton sdpa bias nopos --shapes {WIDE_HEADS} "
    "128:14x14:20/3 128:14x14:32/32",
    "attention-wide-fp16-{gpu}": "attention --precision fp16 --rounds 3 --variants triton sdpa bias nopos --shapes "
    f"{WIDE_HEADS} 128:14x14:20/3",
    "attention-float32-{gpu}": "attention --precision float32 --rounds 2 --variants triton sdpa --shapes "
    "128:14x14:20/3 32:32x32:20/2 128:14x14:32/32 1:64x64:64/64:12 16:14x14:128/128:4",
    "attention-no-positions-{gpu}": "attention --no-positions --rounds 2 --variants triton sdpa --shapes "
    "128:14x14:20/3 128:14x14:32/32 4:64x64:64/64:12 128:14x14:128/128:4",
    "accelerate-{gpu}": "accelerate --rounds 4",
    "table2": "table2 --rounds 4",  # `aaconv table 2` reads this name
    "resnet50-cpp-{gpu}": "model --infer --cpp-wrapper --rounds 4",
}
"""File, without its ending, and what follows `aaconv bench`, or `python` where it is an example. Those that say the
most in the least time come first."""
BENCH = (sys.executable, "-m", "aaconv", "bench")
EXAMPLES = "examples/"
PHASES = {"model": ("--train", "--infer"), LOOP: ("--phases training", "--phases inference")}
"""What asks a command for one of its phases: training takes longer to compile."""
CHECKOUT = Path(__file__).parents[3]
"""Where the examples are; an installed package has none."""


def _line(command: str) -> str:
    """As one types it."""
    return f"{'python' if command.startswith(EXAMPLES) else 'aaconv bench'} {command}"


@dataclass(frozen=True)
class Job:
    """One command, and where its results go."""

    name: str
    words: tuple[str, ...]
    folder: Path

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def unfinished(self) -> Path:
        """Where rows are until the last one is there."""
        return self.folder / f"{self.name}.unfinished.json"

    @property
    def log(self) -> Path:
        """What it printed, after a line with the command."""
        return self.folder / f"{self.name}.log"

    @property
    def unfinished_log(self) -> Path:
        return self.folder / f"{self.name}.unfinished.log"

    @property
    def command(self) -> str:
        return _line(" ".join(self.words))

    @property
    def program(self) -> tuple[str, ...]:
        first, *rest = self.words
        return (sys.executable, str(CHECKOUT / first), *rest) if first.startswith(EXAMPLES) else (*BENCH, *self.words)

    def start(self, *words: str) -> subprocess.Popen:
        with self.unfinished_log.open("w") as out:
            print(self.command, file=out, flush=True)
            return subprocess.Popen(
                [*self.program, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )


def run(
    to: str | Path,
    *,
    only: Sequence[str] | None = None,
    side_by_side: int = 0,
    limit: float | None = None,
    listed: bool = False,
    commands: Mapping[str, str] = COMMANDS,
    device: torch.device | None = None,
) -> None:
    """Measure them into the folder `to`; a SystemExit with status 1 if any is missing at the end.

    only: of the names, without the GPU's; side_by_side: how many compile at a time before anything is measured; limit:
    seconds after which none begins and the running one is ended; listed: print the commands alone; device: what the
    commands compute on, by default a GPU.
    """
    chosen = _choose(commands, only)
    if listed:
        for name, full in chosen.items():
            print(f"{_line(commands[full])}  # {name}")
        return
    here = environment(device or _gpu())
    gpu = "-".join(re.findall(r"[a-z0-9]+", here["device"].lower().removeprefix("nvidia ").removeprefix("geforce ")))
    runnable = [full for full in chosen.values() if _is_here(commands[full])]
    jobs = [Job(full.format(gpu=gpu), tuple(commands[full].split()), Path(to)) for full in runnable]
    with naming_unwritable(to):
        Path(to).mkdir(parents=True, exist_ok=True)
    for job in jobs:
        for path in (job.result, job.unfinished, job.log, job.unfinished_log):
            check_writable(path)
    done = [job for job in jobs if _is_of(job, here)]
    waiting = [job for job in jobs if job not in done]
    progress, began = Progress(), time.monotonic()
    progress(f"{len(jobs)} benchmarks, {len(done)} of them measured at this commit ({here['commit']})")
    if left_out := len(chosen) - len(jobs):
        progress(f"{left_out} left out: they run {EXAMPLES}, which is in a checkout of the repository only")
    until = None if limit is None else began + limit
    with _ending_when_terminated():
        if side_by_side and waiting:
            _compile(waiting, side_by_side, progress, until)
        failed = [job for job in waiting if not _measure(job, progress, until)]
    progress(f"{len(jobs) - len(failed)} measured, {len(failed)} missing")
    if failed:
        raise SystemExit(1)


def _choose(commands: Mapping[str, str], only: Sequence[str] | None) -> dict[str, str]:
    """The names of all, or of some, by what they are called without the GPU."""
    known = {name.replace("-{gpu}", ""): name for name in commands}
    for name in only or ():
        if name not in known:
            raise ValueError(f"unknown benchmark {name!r}; choose of {', '.join(known)}")
    return {name: full for name, full in known.items() if only is None or name in only}


def _is_here(command: str) -> bool:
    return not command.startswith(EXAMPLES) or (CHECKOUT / command.split()[0]).exists()


@contextmanager
def _ending_when_terminated() -> Iterator[None]:
    """SIGTERM as an exception, so that no child goes on alone and keeps the GPU busy."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which alone may listen
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("bench all needs a GPU, and torch finds none; --list prints what it would run")
    return torch.device("cuda")


def _is_of(job: Job, here: Mapping[str, Any]) -> bool:
    """Whether its results are there, of this command, commit, versions and device; not where code has no commit."""
    if not here["commit"] or here["commit"].endswith("-modified"):
        return False
    try:
        found = read_json(job.result)
        command = job.log.read_text(errors="replace").partition("\n")[0]
    except (OSError, ValueError):
        return False
    heads = [head.get("environment") if isinstance(head, dict) else None for head in _as_list(found)]
    same = ("commit", "device", "aaconv", "torch", "triton")
    return command == job.command and all(
        isinstance(head, dict) and all(head.get(key) == here[key] for key in same) for head in heads or [None]
    )


def _as_list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _compile(jobs: Sequence[Job], at_once: int, progress: Progress, until: float | None) -> None:
    """Run them once, side by side; what fails here fails again where it is measured, which names it. Which of several
    kernels is the fastest, the compiler finds out there, when nothing else runs."""
    progress(f"compiling, {at_once} at a time")
    began = time.time()
    pieces = dict.fromkeys(words for job in jobs for words in _pieces(job.words))
    with TemporaryDirectory(prefix="aaconv-bench-") as folder:
        waiting = [Job(str(number), words, Path(folder)) for number, words in enumerate(pieces)]
        running: list[subprocess.Popen] = []
        try:
            while (waiting or running) and not _is_over(until):
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0).start("--rounds", "1"))
                time.sleep(0.1)
                running = [process for process in running if process.poll() is None]
        finally:
            for process in running:
                process.kill()
                process.wait()
    forget_fastest_kernels(began)


def _pieces(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A command that names its networks, for one of them and one phase at a time."""
    if "--models" not in words:
        return [words]
    first = words.index("--models") + 1
    end = next((place for place in range(first, len(words)) if words[place].startswith("--")), len(words))
    asked = {word for way in PHASES.get(words[0], ()) for word in way.split() if word.startswith("--")}
    ways = PHASES.get(words[0], ("",)) if asked.isdisjoint(words) else ("",)
    return [(*words[:first], model, *words[end:], *way.split()) for way in ways for model in words[first:end]]


def _measure(job: Job, progress: Progress, until: float | None) -> bool:
    """Whether it came to its end."""
    if _is_over(until):
        progress(f"{job.name}: not begun, the time is over")
        return False
    progress(f"{job.name}: {job.command}")
    job.unfinished.unlink(missing_ok=True)
    process = job.start("--json", str(job.unfinished))
    try:
        code = process.wait(None if until is None else max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        rows = f"its rows so far are in {job.unfinished}" if job.unfinished.exists() else "it has no row so far"
        progress(f"{job.name}: ended, the time is over; {rows}")
        return False
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code:
        progress(f"{job.name}: failed with exit status {code}; see {job.unfinished_log}")
        return False
    job.unfinished.replace(job.result)
    job.unfinished_log.replace(job.log)  # last: it says which command the result is of
    return True


def _is_over(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until
