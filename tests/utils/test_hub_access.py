"""Weights from the hub without a network: one line, at once."""

import logging
import socket
import time

import pytest
from huggingface_hub import constants

from aaconv.cli import main
from aaconv.utils import hub_access
from aaconv.utils.hub_access import hub_weights, is_reachable


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """No network, and nothing that was downloaded before."""
    asked = []
    monkeypatch.setattr(hub_access, "is_reachable", lambda address: asked.append(address) or False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return asked


def test_without_a_network_predict_is_one_line_at_once(nobody, tmp_path, capfd, caplog):
    (tmp_path / "a.png").touch()
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert main(["predict", "resnet18", "--pretrained", str(tmp_path / "a.png"), "--device", "cpu"]) == 2
    assert time.monotonic() - start < 10
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert f"the weights of resnet18 are not on this machine, and {constants.ENDPOINT} cannot be reached" in error
    assert not caplog.messages
    assert constants.HF_HUB_OFFLINE is False
    assert nobody == [constants.ENDPOINT]


def test_weights_of_this_package_need_no_network(nobody):
    with hub_weights("aa_wrn16_4"):
        assert constants.HF_HUB_OFFLINE is False
    assert nobody == []


def test_errors_keep_their_names_where_there_is_a_network(monkeypatch):
    monkeypatch.setattr(hub_access, "is_reachable", lambda address: True)
    with pytest.raises(KeyError, match="own"), hub_weights("resnet18"):
        raise KeyError("own")


def test_a_port_that_answers_is_reachable(monkeypatch):
    monkeypatch.setattr(hub_access, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert is_reachable(address)
    assert not is_reachable(address)
    monkeypatch.setattr(hub_access, "getproxies", lambda: {"https": "http://proxy"})
    assert is_reachable(address)
