"""Data workers that die."""

import multiprocessing
import re
import subprocess
import sys

import pytest

from aaconv.data.workers import naming_killed_workers
from support.image_files import save_images

LOSE_A_WORKER = """
import multiprocessing, os, signal, sys
from aaconv.data import make_loader, open_dataset
from aaconv.data.workers import naming_killed_workers

loader = make_loader(open_dataset(sys.argv[1]), 2, train=False, size=16, workers=1)
try:
    with naming_killed_workers(lambda: "do this"):
        for step, _ in enumerate(loader.batches()):
            if step == 0:
                (worker,) = multiprocessing.active_children()
                os.kill(worker.pid, signal.SIGKILL)
except ChildProcessError as error:
    print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.processes
def test_a_killed_worker_is_one_line_with_the_way_out(tmp_path):
    """In a process of its own: torch's handler of the signal may raise at any time after it."""
    command = [sys.executable, "-c", LOSE_A_WORKER, str(save_images(tmp_path, 64))]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^a data worker has died.*\.*\); do this$", printed)


def test_both_ways_to_notice_a_dead_worker_are_one_line(monkeypatch):
    def fail_as_torch_does(*_):
        raise RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed. It may be out of memory.")

    told = r"^a data worker has died.*\(DataLoader worker \(pid 3\) is killed by signal: Killed\); do this$"
    with pytest.raises(ChildProcessError, match=told), naming_killed_workers(lambda: "do this"):
        fail_as_torch_does()
    ours, its = multiprocessing.Pipe()
    its.close()
    ended = r"\(its pipe has ended\); do this$"
    with pytest.raises(ChildProcessError, match=ended), naming_killed_workers(lambda: "do this"):
        ours.recv()
    # The signal comes while the report waits for it: what torch's handler of it says names the worker.
    monkeypatch.setattr("aaconv.data.workers.time.sleep", fail_as_torch_does)
    with pytest.raises(ChildProcessError, match=told), naming_killed_workers(lambda: "do this"):
        ours.recv()
    monkeypatch.undo()
    with pytest.raises(EOFError, match=r"^of a file$"), naming_killed_workers(lambda: "do this"):
        raise EOFError("of a file")


def test_other_errors_of_torch_are_not_taken_for_a_killed_worker():
    with pytest.raises(RuntimeError, match=r"^shapes$"), naming_killed_workers(lambda: "do this"):
        raise RuntimeError("shapes")
