"""Accelerated attention modules of timm on a GPU: as exact as their own forward, fused, in less memory."""

import pytest
import torch
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.vision_transformer_sam import Attention

from aaconv.attention import default_backend
from aaconv.benchmark.measure import peak_memory
from aaconv.layers.accelerate import accelerate
from support.accelerated_laws import assert_as_exact, assert_same, drawn, output_and_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CASES = {
    "sam window": lambda: (Attention(192, 3, use_rel_pos=True, input_size=(14, 14)), (8, 14, 14, 192)),
    "sam global": lambda: (Attention(128, 2, use_rel_pos=True, input_size=(32, 32)), (1, 32, 32, 128)),
    "sam resized": lambda: (Attention(160, 2, use_rel_pos=True, input_size=(14, 14)), (2, 20, 9, 160)),
    "bottleneck": lambda: (BottleneckAttn(256, feat_size=(16, 16)), (4, 256, 16, 16)),
    "halo": lambda: (HaloAttn(128, num_heads=4, block_size=8, halo_size=2), (4, 128, 16, 16)),
    "multiscale": lambda: (
        MultiScaleAttention(192, 192, (14, 14), 2, kernel_q=(3, 3), kernel_kv=(3, 3), stride_kv=(2, 2)),
        (4, 197, 192),
        (14, 14),
    ),
}


def made(name):
    module, shape, *rest = CASES[name]()
    return drawn(module, torch.float32).cuda(), torch.randn(shape, device="cuda"), *rest


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_as_exact_as_the_librarys_own(name, precision):
    with default_backend("triton"):
        assert_as_exact(*made(name), precision=precision)


@pytest.mark.parametrize("name", CASES)
def test_float32(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # in the convolutions of these modules
    module, x, *rest = made(name)
    exact = {key: part.float() for key, part in output_and_gradients(module.double(), x.double(), *rest).items()}
    accelerate(module.float())
    assert_same(output_and_gradients(module, x, *rest), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["sam global", "bottleneck"])
def test_compiled_without_graph_breaks(name):
    module, x, *rest = made(name)
    accelerate(module)
    compiled = torch.compile(module, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        found, wanted = (output_and_gradients(one, x, *rest) for one in (compiled, module))
    for key, part in wanted.items():
        error, size = (found[key] - part).norm(), part.norm()
        assert error <= 0.02 * size + 1e-3, key


def test_nothing_quadratic_is_kept():
    """Of a map of 64 x 64 the weights alone would be 2 x 4096^2 numbers: 64 MiB in bfloat16."""
    module = drawn(Attention(128, 2, use_rel_pos=True, input_size=(64, 64)), torch.bfloat16).cuda()
    x = torch.randn(1, 64, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        module(x).sum().backward()
        x.grad = None
        module.zero_grad()

    before = peak_memory(step, x.device)
    accelerate(module)
    after = peak_memory(step, x.device)
    assert after < 2**25 < before
