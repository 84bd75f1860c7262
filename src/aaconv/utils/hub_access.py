"""Weights from the Hugging Face hub where there may be no network: one line at once instead of minutes of retries."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
from huggingface_hub import constants

PATIENCE = 3.0  # seconds for a connection
WAY_OUT = "name a run, or a file of weights with --weights"


@contextmanager
def hub_weights(name: str, way_out: str = WAY_OUT) -> Iterator[None]:
    """Within it timm may load the weights of a model's name; without a network only those that are on this machine.

    The hub's client asks again and again, with a line each time; where nobody answers at all it is told to be offline.
    """
    offline = constants.HF_HUB_OFFLINE
    if not _are_on_hub(name) or (not offline and is_reachable(constants.ENDPOINT)):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:
        raise ConnectionError(
            f"the weights of {name} are not on this machine, and {constants.ENDPOINT} cannot be reached; {way_out}"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = offline


def is_reachable(address: str) -> bool:
    """Does anybody answer there? Behind a proxy only the proxy knows."""
    if getproxies():
        return True
    place = urlsplit(address)
    port = place.port or (80 if place.scheme == "http" else 443)
    try:
        socket.create_connection((place.hostname, port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def _are_on_hub(name: str) -> bool:
    if ":" in name:
        return name.startswith("hf-hub:")
    known = timm.get_pretrained_cfg(name) if timm.is_model(name.partition(".")[0]) else None
    return known is not None and not known.file and bool(known.hf_hub_id or known.url)
