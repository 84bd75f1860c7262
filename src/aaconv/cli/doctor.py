"""`aaconv doctor`."""

import argparse

from .parsing import Parser


def add_commands(commands: Parser) -> None:
    commands.add("doctor", _doctor, "show what this machine can run, and each model's backend")


def _doctor(chosen: argparse.Namespace) -> None:
    from .doctor_report import print_report

    print_report()
