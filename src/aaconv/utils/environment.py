"""What a result depends on besides its settings: versions, device, commit."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..version import __version__


def version_of(package: str) -> str | None:
    """The version of an installed package, None where there is none."""
    try:
        return import_module(package).__version__
    except ImportError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    found: dict[str, Any] = {"aaconv": __version__, "commit": _commit(), "python": platform.python_version()}
    found |= {package: version_of(package) for package in ("torch", "triton", "timm")}
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    found["cuda"] = torch.version.cuda if device.type == "cuda" else None
    found["threads"] = torch.get_num_threads()
    found["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return found


def cpu_name() -> str:
    """What the CPU is called, and the threads that torch computes with on it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _commit() -> str | None:
    """Of the checkout this file is in, marked where it differs; AACONV_COMMIT names it where there is only a copy."""
    if named := os.environ.get("AACONV_COMMIT"):
        return named
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if not git("ls-files", "version.py"):
            return None  # installed inside somebody else's checkout
        return git("rev-parse", "--short=12", "HEAD") + ("-modified" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
