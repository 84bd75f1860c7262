"""The kernels for small maps as triton compiles them, and which calls take them; no GPU is needed for that."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from aaconv.attention import triton_backend, triton_launch, triton_plan
from support.compiled_kernels import DISASSEMBLER, accesses_of_pixels, code, plan, stack_bytes

KERNELS = list(triton_plan.SMALL_KERNELS)
SHAPES = [(2, 7, 7, 8, 20, 6), (2, 8, 8, 8, 20, 8), (2, 14, 14, 8, 20, 3), (2, 16, 16, 8, 20, 4)]
WIDEST = (2, 16, 16, 8, 24, 14)
STACK = {SHAPES[2]: (0, 560), SHAPES[3]: (32, 576), WIDEST: (96, 688)}
"""Most bytes a thread that wait in memory on an A100 and on cards such as the L4 and the 4090, of the forward and of
the backward: what triton 3.9 needs and up to 16 more, and none on smaller maps. A Hopper GPU needs more of each."""
pytestmark = [pytest.mark.usefixtures("small_kernels"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_uses_wgmma(kernel, shape):
    """As of the packed kernels: it would read beyond the shared memory of operands as small as ours."""
    assembly = code(kernel, shape, torch.bfloat16).asm["ptx"]
    assert "mma.sync" in assembly
    assert "wgmma" not in assembly


@pytest.mark.parametrize("side", [7, 8, 9, 14, 16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_more_is_loaded_or_stored_at_once_than_is_aligned(kernel, side):
    """Two heads of 20 and 3 channels: pixels are 86 apart, so pairs of queries' and keys' channels are aligned, and
    single ones of values."""
    accesses = accesses_of_pixels(code(kernel, (1, side, side, 2, 20, 3), torch.bfloat16).asm["ptx"])
    assert accesses
    for size, line in accesses:
        assert size <= (2 if "DV" in line else 4), line


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_kernel_waits_for_nobody_and_lets_nobody_in(kernel, overlap, monkeypatch):
    """It begins when all before it has ended, and what follows waits for its end."""
    monkeypatch.setattr(triton_plan, "launches_overlap", lambda: overlap)
    chosen = plan(SHAPES[2], torch.bfloat16, backward="backward" in kernel)
    assert chosen.kernels == [kernel]
    assert "launch_pdl" not in chosen.launch_constants(kernel, [])
    assert not re.findall(r"griddepcontrol", code(kernel, SHAPES[2], torch.bfloat16).asm["ptx"])


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="triton came without cuobjdump")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_registers_are_enough_for_the_forward(shape, tmp_path):
    assert stack_bytes(code("attend_small_forward", shape, torch.bfloat16).asm["cubin"], tmp_path) <= 64


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="triton came without cuobjdump")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_the_backward_some_values_wait_in_memory(shape, tmp_path):
    """A tenth of its instructions on the largest maps: all gradients of a head's keys stay with one program."""
    stack = stack_bytes(code("attend_small_backward", shape, torch.bfloat16).asm["cubin"], tmp_path)
    assert stack <= (768 if shape[1] > 8 else 128)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("shape", [*SHAPES, WIDEST], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_a100_and_a_card_with_99_kib_of_shared_memory_are_enough(kernel, shape, capability, tmp_path):
    compiled = code(kernel, shape, torch.bfloat16, capability)
    assert compiled.metadata.shared <= (99 if shape == WIDEST else 48) * 1024
    if DISASSEMBLER.exists():
        assert stack_bytes(compiled.asm["cubin"], tmp_path) <= STACK.get(shape, (0, 0))[KERNELS.index(kernel)]


@pytest.mark.slow
@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="triton came without cuobjdump")
@pytest.mark.parametrize("kernel", KERNELS)
def test_of_the_widest_heads_more_values_wait_in_memory(kernel, tmp_path):
    stack = stack_bytes(code(kernel, WIDEST, torch.bfloat16).asm["cubin"], tmp_path)
    assert stack <= (144 if kernel == "attend_small_forward" else 784)


@pytest.mark.parametrize(
    ("shape", "dtype", "small"),
    [
        ((2, 16, 16, 8, 20, 3), torch.bfloat16, True),
        ((2, 16, 16, 8, 24, 14), torch.float16, True),
        ((2, 8, 8, 8, 32, 14), torch.float16, True),
        ((2, 9, 8, 8, 25, 14), torch.float16, False),
        ((2, 8, 9, 8, 25, 14), torch.float16, False),
        ((2, 1, 1, 1, 1, 1), torch.bfloat16, True),
        ((2, 17, 2, 8, 20, 3), torch.bfloat16, False),
        ((2, 2, 17, 8, 20, 3), torch.bfloat16, False),
        ((2, 7, 7, 8, 33, 3), torch.bfloat16, False),
        ((2, 14, 14, 8, 20, 15), torch.bfloat16, False),
        ((2, 14, 14, 8, 20, 3), torch.float32, False),
    ],
)
@pytest.mark.parametrize("backward", [True, False])
def test_small_maps_with_narrow_heads_take_them(shape, dtype, small, backward):
    chosen = plan(shape, dtype, backward)
    assert chosen.is_small == small
    if small:
        assert not chosen.program.scratch
        assert list(chosen.chunks()) == [(0, chosen.image_heads)]


def test_few_heads_share_the_queries_in_the_forward_and_are_packed_in_the_backward(monkeypatch):
    monkeypatch.setattr(triton_plan, "HEADS_ON_A_MULTIPROCESSOR", 1)
    triton_plan.plan_for.cache_clear()
    few, many = (1, 14, 14, 8, 20, 3), (128, 14, 14, 8, 20, 3)
    assert plan(few, torch.bfloat16, backward=False).parts == 7  # of 32 slots each
    assert plan(many, torch.bfloat16, backward=False).parts == 1
    assert not plan(few, torch.bfloat16).is_small
    assert plan(many, torch.bfloat16).is_small


@pytest.mark.parametrize("tables", ["shared", "per head", "none"])
def test_one_kernel_does_it_with_shared_tables(tables, monkeypatch):
    launched = []
    monkeypatch.setattr(triton_launch, "INTERPRETED", True)
    monkeypatch.setattr(
        triton_launch.Launcher, "_run", lambda launcher, *arguments: launched.append(launcher.kernel.__name__)
    )
    qkv, lead = torch.zeros(2, 12, 86, dtype=torch.bfloat16), {"shared": (), "per head": (2,)}.get(tables)
    rel_h, rel_w = (None, None) if lead is None else (torch.zeros(*lead, 5, 20), torch.zeros(*lead, 7, 20))
    out, lse = triton_backend.forward(qkv, rel_h, rel_w, 3, 2, 40)
    triton_backend.backward(out, qkv, rel_h, rel_w, out, lse, 3, 2, 40)
    assert (launched == [*KERNELS, "sum_rows"]) == (tables == "shared")


@pytest.mark.parametrize("depth", range(1, triton_plan.SMALL_DEPTH + 1))
def test_rows_have_room_beside_a_head(depth):
    side = 14 if depth <= triton_plan.LARGER_DEPTH else 8
    sizes = plan((2, side, side, 8, depth, 3), torch.bfloat16).constants
    assert depth <= sizes["ROWS_AT"]
    assert sizes["ROWS_AT"] + sizes["GROUP"] <= sizes["DEPTH"]
    assert depth <= sizes["MAIN"] + sizes["REST"]
    assert sizes["REST"] == 0 or depth > sizes["MAIN"]
