"""Where files of pretrained weights lie that a person has put there, for machines without a network, and what to call
their content on every machine."""

import hashlib
import os
from pathlib import Path

ENDINGS = (".safetensors", ".pth", ".pt", ".bin")


def weights_folder() -> Path:
    return Path(os.environ.get("AACONV_WEIGHTS") or "~/.cache/aaconv/weights").expanduser()


def own_file(name: str) -> Path | None:
    """The file of weights for a model's name, with its tag or without; None where there is none."""
    stems = dict.fromkeys((name.replace("/", "-"), name.partition(".")[0].replace("/", "-")))
    files = (weights_folder() / f"{stem}{ending}" for stem in stems for ending in ENDINGS)
    return next((file for file in files if file.is_file()), None)


def short_sha256(file: str | Path) -> str:
    """The first 12 digits of the sha256 of a file's content."""
    digest = hashlib.sha256()
    with Path(file).open("rb") as opened:
        while part := opened.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:12]
