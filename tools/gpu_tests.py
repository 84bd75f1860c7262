"""Run tests/gpu in several processes that share the GPU, with pytest alone.

    PYTHONPATH=src python3 tools/gpu_tests.py --processes 12 --logs logs

Most of the time goes to compilers, which are single threads. A process that crashes (an illegal memory access leaves no
other way) is reported with the test that it was running, and another one goes on with the rest. Tests marked `alone`
(they compare times, or need most of the memory) run at the end, one after the other.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS, REPORTS = "AACONV_TESTS_COMMANDS", "AACONV_TESTS_REPORTS"
DEAD_DEVICE = re.compile(r"CUDA error|AcceleratorError|illegal memory access|device-side assert|misaligned address")
"""After one of these no test of the process can pass."""
LONG = [
    (re.compile(r"compile|reduce-overhead|default|detection.*learns"), 40),
    (re.compile(r"train|learn|course|batch_as_in"), 15),
]
"""Seconds to expect of tests whose name fits: the longest ones begin first."""
AT_ONCE = 4
"""Tests of one function that a process gets together: they share fixtures and compiled kernels."""


class Worker:
    """The plugin of a process: tells the tests there are, then runs those that it is sent, group by group."""

    def __init__(self) -> None:
        self.commands = os.fdopen(int(os.environ[COMMANDS]))
        self.reports = os.fdopen(int(os.environ[REPORTS]), "w")
        self.outcome, self.seconds, self.text = "passed", 0.0, ""

    def tell(self, **report) -> None:
        self.reports.write(json.dumps(report) + "\n")
        self.reports.flush()

    def pytest_runtestloop(self, session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.tell(tests=[(name, item.get_closest_marker("alone") is not None) for name, item in items.items()])
        for line in self.commands:
            group = [items[name] for name in json.loads(line)]
            for item, following in zip(group, [*group[1:], None], strict=True):
                self.outcome, self.seconds, self.text = "passed", 0.0, ""
                self.tell(begun=item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                dead = self.outcome == "failed" and bool(DEAD_DEVICE.search(self.text))
                result = {"outcome": self.outcome, "seconds": self.seconds, "text": self.text}
                self.tell(ended=item.nodeid, **result, last=last_line(self.text), dead=dead)
                if dead:
                    os._exit(1)  # an orderly end would wait for the device
        return True

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds += report.duration
        if report.failed:
            self.outcome, self.text = "failed", self.text + report.longreprtext
        elif report.skipped and self.outcome == "passed":
            self.outcome, self.text = "skipped", report.longreprtext

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.tell(broken=report.nodeid, last=last_line(report.longreprtext), text=report.longreprtext)


def last_line(text: str) -> str:
    """What went wrong, of a traceback: its last line of an error, else its last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors[0] if errors else lines[-1] if lines else "")[:200]


class Process:
    """One process with pytest in it."""

    def __init__(self, paths: list[str], log: Path) -> None:
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()
        few_threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        environment = {**few_threads, **os.environ, COMMANDS: str(commands), REPORTS: str(reports)}
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *paths],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                cwd=ROOT,
                pass_fds=(commands, reports),
            )
        os.close(commands)
        os.close(reports)
        self._read = b""

    def send(self, group: list[str]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, (json.dumps(group) + "\n").encode())

    def read(self) -> dict | None:
        """The next report; None when the process has ended, whoever it leaves behind with a pipe still open."""
        while b"\n" not in self._read:
            ended = self.process.poll() is not None  # asked before: what it has written is there by then
            ready, _, _ = select.select([self._reports], [], [], 0.0 if ended else 1.0)
            more = os.read(self._reports, 2**16) if ready else b""
            if not more and (ready or ended):
                return None
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def close(self) -> int:
        """Let it end; the exit status."""
        os.close(self._commands)
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        os.close(self._reports)
        return code


class Run:
    """The tests, what became of them, and what is printed about it."""

    def __init__(self, paths: list[str], logs: Path) -> None:
        self.paths, self.logs = paths, logs
        self.lock, self.running, self.stopped = threading.Lock(), set(), False
        self.results: dict[str, tuple[str, float]] = {}
        self.of_file: dict[str, set[str]] = defaultdict(set)
        self.groups: queue.Queue[list[str]] = queue.Queue()
        self.begun = time.monotonic()

    def collect(self) -> tuple[list[str], list[str]]:
        """Names of the tests that may run beside others, and of those that may not."""
        process, found = self.start("collect"), None
        while found is None and (report := process.read()) is not None:
            found = report.get("tests")
            if "broken" in report:
                self.end(report["broken"], "failed", 0.0, report["last"], report["text"])
        if process.close() and found is None and not self.results:
            sys.exit(f"no tests could be collected; see {self.logs / 'collect.log'}")
        for name, _ in found or []:
            self.of_file[name.split("::")[0]].add(name)
        return [name for name, alone in found or [] if not alone], [name for name, alone in found or [] if alone]

    def start(self, name: str) -> Process:
        process = Process(self.paths, self.logs / f"{name}.log")
        self.running.add(process.process)
        return process

    def work(self, tests: list[str], processes: int) -> None:
        if self.stopped:
            return
        for group in sorted(grouped(tests), key=expected_seconds, reverse=True):
            self.groups.put(group)
        threads = [threading.Thread(target=self._serve, args=(f"process{i}",)) for i in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, name: str) -> None:
        """Keep a process busy until there are no groups, and start another one where it has died."""
        process = None
        while True:
            try:
                group = self.groups.get_nowait()
            except queue.Empty:
                break
            if process is None:
                process = self.start(name)
                if process.read() is None and not self.stopped:  # the tests, which are known
                    self.end(group[0], "crashed", 0.0, f"its process did not start; see {name}.log")
                    process, rest = None, group[1:]
                    if rest:
                        self.groups.put(rest)
                    continue
            process = self._run(process, group)
        if process is not None:
            process.close()

    def _run(self, process: Process, group: list[str]) -> Process | None:
        process.send(group)
        left, current, since = list(group), group[0], time.monotonic()
        while left:
            report = process.read()
            if report is None:
                code = process.close()
                if current == left[0] and not self.stopped:
                    how = f"signal {-code}" if code < 0 else f"exit status {code}"
                    self.end(current, "crashed", time.monotonic() - since, f"its process ended with {how}")
                    left.pop(0)
                if left and not self.stopped:
                    self.groups.put(left)
                return None
            if "begun" in report:
                current, since = report["begun"], time.monotonic()
            elif "ended" in report:
                self.end(report["ended"], report["outcome"], report["seconds"], report["last"], report["text"])
                left.remove(report["ended"])
                current = ""
                if report["dead"]:
                    process.close()
                    if left:
                        self.groups.put(left)
                    return None
        return process

    def end(self, test: str, outcome: str, seconds: float, last: str, text: str = "") -> None:
        with self.lock:
            self.results[test] = outcome, seconds
            if outcome in ("failed", "crashed"):
                print(f"{outcome.upper()} {test}: {last}", flush=True)
                with (self.logs / "failures.txt").open("a") as file:
                    file.write(f"{'=' * 20} {outcome} {test}\n{text or last}\n")
            file = test.split("::")[0]
            done = {name for name in self.of_file[file] if name in self.results}
            if done and done == self.of_file[file]:
                seconds = sum(self.results[name][1] for name in done)
                print(f"{file}: {count(self.results[name][0] for name in done)}, {seconds:.0f} s of work", flush=True)

    def stop(self) -> None:
        """Out of time: end every process, and leave nothing for another one."""
        self.stopped = True
        with contextlib.suppress(queue.Empty):
            while True:
                self.groups.get_nowait()
        for process in list(self.running):
            if process.poll() is None:
                process.kill()

    def summary(self, tests: list[str], longest: int) -> int:
        seconds = time.monotonic() - self.begun
        by_time = sorted(self.results, key=lambda name: -self.results[name][1])[:longest]
        for name in by_time:
            print(f"{self.results[name][1]:6.1f} s  {name}")
        outcomes = [outcome for outcome, _ in self.results.values()]
        missing = len(set(tests) - self.results.keys())
        print(f"{count([*outcomes, *['not run'] * missing])} in {seconds:.0f} s", flush=True)
        bad = missing or not outcomes or any(outcome in ("failed", "crashed") for outcome in outcomes)
        if bad and (self.logs / "failures.txt").exists():
            print(f"tracebacks: {self.logs / 'failures.txt'}")
        return 1 if bad else 0


def grouped(tests: list[str]) -> list[list[str]]:
    """Tests of one function, as many at once as are quick."""
    functions: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        functions[test.split("[")[0]].append(test)
    groups = []
    for together in functions.values():
        step = 1 if expected_seconds(together[:1]) > 10 else AT_ONCE
        groups += [together[first : first + step] for first in range(0, len(together), step)]
    return groups


def expected_seconds(group: list[str]) -> float:
    return sum(next((seconds for pattern, seconds in LONG if pattern.search(test)), 3) for test in group)


def count(outcomes) -> str:
    counts = Counter(outcomes)
    kinds = [kind for kind in ("passed", "failed", "crashed", "skipped", "not run") if counts[kind] or kind == "passed"]
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["tests/gpu"], help="test files or folders (tests/gpu)")
    parser.add_argument("--processes", type=int, default=8, help="that share the GPU (8)")
    parser.add_argument("--limit", type=float, help="seconds after which what still runs is stopped")
    parser.add_argument("--logs", type=Path, help="folder for tracebacks and output (a temporary one)")
    parser.add_argument("--longest", type=int, default=10, help="print the longest tests (10)")
    chosen = parser.parse_args()
    if chosen.processes < 1:
        parser.error(f"--processes must be at least 1, got {chosen.processes}")
    return chosen


def main() -> int:
    if COMMANDS in os.environ:
        return pytest.main(["-q", "-p", "no:cacheprovider", "--durations=0", *sys.argv[1:]], plugins=[Worker()])
    chosen = options()
    logs = (chosen.logs or Path(tempfile.mkdtemp(prefix="gpu_tests_"))).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "failures.txt").unlink(missing_ok=True)
    run = Run(chosen.paths, logs)
    timer = threading.Timer(chosen.limit, run.stop) if chosen.limit else None
    if timer:
        timer.daemon = True
        timer.start()
    beside, alone = run.collect()
    print(f"{len(beside)} tests in {chosen.processes} processes, then {len(alone)} alone", flush=True)
    run.work(beside, chosen.processes)
    run.work(alone, 1)
    return run.summary([*beside, *alone], chosen.longest)


if __name__ == "__main__":
    sys.exit(main())
