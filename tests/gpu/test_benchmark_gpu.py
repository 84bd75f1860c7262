"""What the benchmarks do on a GPU only: CUDA graphs that do the same work, and peak memory."""

import pytest
import torch

from aaconv.attention import triton_backend
from aaconv.benchmark import model
from aaconv.benchmark.kernels import kernel_times
from aaconv.benchmark.measure import graphed, peak_memory, time_interleaved

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


def test_a_graph_repeats_its_call():
    x = torch.zeros(1, device=DEVICE)
    replay = graphed(lambda: x.add_(1), repeats=5, warm_up=2)
    torch.cuda.synchronize()
    before = x.item()
    replay()
    assert x.item() == before + 5


def test_graphs_of_training_steps_share_a_pool_and_still_train():
    pool = torch.cuda.graph_pool_handle()
    networks = [model.Network(name).build(16) for name in ("plain_wrn16_4", "aa_wrn16_4")]
    steps = [graphed(model.prepare_training(n, 4, 16, False, DEVICE)[0], pool=pool) for n in networks]
    for _ in range(5):
        before = [[p.detach().clone() for p in network.parameters()] for network in networks]
        for step in steps:
            step()
        for network, old in zip(networks, before, strict=True):
            assert all(p.isfinite().all() for p in network.parameters())
            assert all(not torch.equal(p, q) for p, q in zip(network.parameters(), old, strict=True))


def test_peak_memory_is_what_was_alive_at_once():
    kept = torch.zeros(2**22, dtype=torch.uint8, device=DEVICE)

    def two_of_three_alive():
        first, second = (torch.zeros(2**24, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        del first
        return second, torch.zeros(2**24, dtype=torch.uint8, device=DEVICE)

    assert peak_memory(two_of_three_alive, DEVICE, [kept]) == 2 * 2**24 + 2**22


def test_larger_products_take_longer():
    small, large = (torch.randn(n, n, device=DEVICE) for n in (256, 4096))
    timings = time_interleaved({"small": lambda: small @ small, "large": lambda: large @ large}, DEVICE, rounds=5)
    assert timings["small"].p50 < timings["large"].p50


def test_kernels_are_told_apart():
    qkv, weight = torch.randn(4, 14, 14, 86, device=DEVICE), torch.randn(512, 512, device=DEVICE)

    def call():
        triton_backend.attend(qkv, None, None, num_heads=2, key_channels=40)
        return weight @ weight

    times = kernel_times(call)
    assert {"pack", "attend_forward", "convolutions and products"} <= times.keys()
    assert min(times.values()) > 0
