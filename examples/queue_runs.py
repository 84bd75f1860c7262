"""Train many recipes with several seeds, some side by side, and record what comes out.

    python examples/queue_runs.py 'imagenette-ablation-*' --seeds 0 1 2 --jobs 3 -- --data-dir DATA

A run goes into RUNS/RECIPE-seedN, its output into RUNS/RECIPE-seedN.log. Start the same command again whenever it was
cut off: what is finished is only recorded, what was begun is resumed, and what failed is tried again. All seeds of one
round come before the next, so that there is something to compare early. What follows `--` is for `aaconv train`.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from aaconv import recipes
from aaconv.runs.record import record_result
from aaconv.runs.run_folder import is_finished, is_run

TRAIN = (sys.executable, "-m", "aaconv", "train")


@dataclass(frozen=True)
class Job:
    """One run: a recipe with one seed."""

    recipe: str
    seed: int
    runs: Path

    @property
    def folder(self) -> Path:
        return self.runs / f"{self.recipe}-seed{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def command(self, options: Sequence[str]) -> list[str]:
        """What begins the run, or resumes it."""
        if is_run(self.folder):  # as it began: of the options only the device can be another
            device = [word for pair in pairwise(options) if pair[0] == "--device" for word in pair]
            return [*TRAIN, "--resume", str(self.folder), *device]
        return [*TRAIN, self.recipe, "--seed", str(self.seed), "--run", str(self.folder), *options]


def jobs_of(patterns: Sequence[str], seeds: Sequence[int], runs: Path) -> list[Job]:
    """Every recipe of that name, or that fits a pattern, with every seed; the seeds one after the other."""
    found = ([one] if one in recipes.names() else recipes.names(one) for one in patterns)
    names = list(dict.fromkeys(name for some in found for name in some))
    return [Job(name, seed, runs) for seed in seeds for name in names]


def work_through(jobs: Sequence[Job], options: Sequence[str], *, at_once: int, results: Path) -> list[Job]:
    """Train all that are not finished, `at_once` at a time; returns those that failed. Ctrl-C lets the running ones
    save their state."""
    waiting, running, failed = list(jobs), {}, []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                if is_finished(job.folder):
                    failed += _record(job, results)
                    continue
                running[job] = _start(job, options)
            time.sleep(0.2)
            for job, process in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    if process.returncode == 0:
                        failed += _record(job, results)
                    else:
                        failed.append(job)
                        say(job, f"failed: {_last_line(job.log)}")
    except KeyboardInterrupt:
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for job, process in running.items():
            process.wait()
            say(job, f"stopped: {_last_line(job.log)}")
        raise SystemExit(130) from None
    return failed


def _start(job: Job, options: Sequence[str]) -> subprocess.Popen:
    command = job.command(options)
    say(job, "resumes" if "--resume" in command else "begins")
    job.runs.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as log:
        # A session of its own: Ctrl-C at the terminal reaches it once, from here.
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _record(job: Job, results: Path) -> list[Job]:
    """Empty, or the job if there is no record of it now."""
    try:
        say(job, f"recorded in {record_result(job.folder, results)}")
    except ValueError as error:
        say(job, f"not recorded: {error}")
        return [job]
    return []


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it has printed nothing")


def say(job: Job, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {job.folder.name}  {text}", flush=True)


def options_of_queue() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="+", metavar="RECIPE", help="names or wildcard patterns; `aaconv recipes`")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="default: 0")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side, default: 1")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="default: runs")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="default: results")
    return parser


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is for the queue, and what follows `--`."""
    end = words.index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def main(words: Sequence[str]) -> int:
    own, options = split(words)
    parser = options_of_queue()
    chosen = parser.parse_args(own)
    try:
        jobs = jobs_of(chosen.patterns, chosen.seeds, chosen.runs)
    except ValueError as error:
        parser.error(str(error))
    print(f"{len(jobs)} runs, {sum(is_finished(job.folder) for job in jobs)} of them finished", flush=True)
    failed = work_through(jobs, options, at_once=max(1, chosen.jobs), results=chosen.results)
    print(f"{len(jobs) - len(failed)} finished, {len(failed)} failed")
    for job in failed:
        print(f"  {job.folder}: see {job.log}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
