"""`aaconv doctor`."""

import argparse
from typing import Any

from .parsing import add


def add_commands(commands: Any) -> None:
    add(commands, "doctor", _doctor, "what this machine can run, and which backend each model would take")


def _doctor(chosen: argparse.Namespace) -> None:
    from .doctor_report import print_report

    print_report()
