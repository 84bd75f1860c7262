"""The kernels as triton compiles them for a Hopper GPU; no GPU is needed for that."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from aaconv.attention import triton_backend, triton_launch, triton_plan, triton_tiles  # noqa: E402
from aaconv.attention.triton_plan import launches_overlap  # noqa: E402  the one that the fixture does not replace
from support.compiled_kernels import DISASSEMBLER, accesses_of_pixels, code, plan, stack_bytes  # noqa: E402


@pytest.fixture(autouse=True)
def on_a_hopper_gpu(monkeypatch, packed_kernels):
    monkeypatch.setattr(triton_plan, "launches_overlap", lambda: True)


@pytest.mark.parametrize(
    ("capability", "variable", "overlap"),
    [((9, 0), None, True), ((10, 0), "1", True), ((8, 9), None, False), ((9, 0), "0", False)],
)
def test_kernels_overlap_from_hopper_on_unless_told_otherwise(capability, variable, overlap, monkeypatch):
    monkeypatch.setattr(triton_plan, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.delenv("AACONV_OVERLAP", raising=False)
    if variable is not None:
        monkeypatch.setenv("AACONV_OVERLAP", variable)
    assert launches_overlap() == overlap


def test_a_switch_that_is_neither_on_nor_off_is_named(monkeypatch):
    monkeypatch.setenv("AACONV_OVERLAP", "no")
    with pytest.raises(ValueError, match=r"AACONV_OVERLAP must be 0 .* or 1, got 'no'"):
        launches_overlap()


PLAN = ((2, 45, 86), (3870, 86, 1), torch.bfloat16, 2, torch.float32, 5, 2, 40)  # 5 x 9, two heads of 20 and 3
KERNELS = [name for name in triton_tiles.TILES if name not in triton_plan.SMALL_KERNELS]
SHAPES = [(2, 14, 14, 8, 20, 3), (2, 32, 32, 8, 20, 2), (2, 14, 14, 8, 32, 32)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_uses_wgmma(kernel, shape):
    """Triton 3.6 and 3.7 let it read beyond the shared memory of operands as small as ours."""
    assembly = code(kernel, shape, torch.bfloat16).asm["ptx"]
    assert "mma.sync" in assembly
    assert "wgmma" not in assembly


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("side", [8, 14, 20, 32, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_more_is_loaded_or_stored_at_once_than_is_aligned(kernel, side):
    """Two heads of 20 and 3 channels: pixels are 86 apart, so pairs of queries' and keys' channels are aligned, and
    single ones of values. Triton infers it from the indices, not always rightly; on a GPU that ends the process."""
    accesses = accesses_of_pixels(code(kernel, (1, side, side, 2, 20, 3), torch.bfloat16).asm["ptx"])
    assert accesses
    for size, line in accesses:
        assert size <= (2 if "DV" in line else 4), line


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_follow_each_other_closely_where_the_gpu_can(kernel, overlap, monkeypatch):
    """A kernel without `launch_pdl` waits for all before it, one with it waits by itself. Who lets the next begin has
    waited before that: the next but one counts on it. `pack` has nothing to wait for, the last ones none to let in."""
    monkeypatch.setattr(triton_plan, "launches_overlap", lambda: overlap)
    options = plan(SHAPES[0], torch.bfloat16).launch_constants(kernel, [])
    assert options.get("launch_pdl", False) == (overlap and kernel != "pack")
    assembly = code(kernel, SHAPES[0], torch.bfloat16).asm["ptx"]
    commands = re.findall(r"griddepcontrol\.(\w+)", assembly)
    expected = [] if kernel == "pack" else ["wait"]
    if kernel not in ("attend_forward", "relative_backward"):
        expected.append("launch_dependents")
    assert commands == (expected if overlap else [])
    if kernel.startswith("attend") and overlap:  # what goes into the products is loaded after the wait, all of it
        before, after = assembly.split("griddepcontrol.wait")
        assert "cp.async" in after
        assert "cp.async" not in before


@pytest.mark.parametrize("tables", [True, False])
def test_kernels_follow_each_other_in_an_order_they_count_on(tables, monkeypatch):
    """relative_backward waits for nothing at first: all it reads is there once the keys' kernel has begun."""
    launched = []
    monkeypatch.setattr(triton_launch, "INTERPRETED", True)
    monkeypatch.setattr(
        triton_launch.Launcher, "_run", lambda launcher, *arguments: launched.append(launcher.kernel.__name__)
    )
    monkeypatch.setattr(triton_plan.Plan, "chunks", lambda plan: iter([(0, 2), (2, 2)]))
    monkeypatch.setattr(triton_backend, "plan_for", triton_plan.Plan)  # not the one that is remembered
    qkv = torch.zeros(2, 12, 86, dtype=torch.bfloat16)
    rel_h, rel_w = (torch.zeros(5, 20), torch.zeros(7, 20)) if tables else (None, None)
    out, lse = triton_backend.forward(qkv, rel_h, rel_w, 3, 2, 40)
    assert launched == ["pack", "attend_forward"] * 2
    launched.clear()
    triton_backend.backward(out, qkv, rel_h, rel_w, out, lse, 3, 2, 40)
    once = ["pack", "attend_backward_queries", "attend_backward_keys", *["relative_backward"] * tables]
    assert launched == [*once * 2, *["sum_rows"] * tables]


ELONGATED = [(2, height, width, 8, 20, 3) for height, width in [(3, 67), (12, 80), (8, 128), (1, 64), (20, 20)]]


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="triton came without cuobjdump")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [(kernel, shape) for kernel in KERNELS for shape in ((2, 7, 7, 8, 20, 6), *SHAPES, (2, 40, 40, 8, 20, 3))]
    + [("relative_backward", shape) for shape in (*ELONGATED, (2, 32, 32, 8, 64, 64), (2, 8, 8, 8, 128, 128))]
    + [("pack", shape) for shape in (*ELONGATED, (2, 100, 9, 8, 20, 3), (2, 128, 3, 8, 20, 3))],
    ids=str,
)
def test_registers_are_enough(kernel, shape, tmp_path):
    """Some values may wait in memory; gradients that live there make a kernel ten times slower."""
    assert stack_bytes(code(kernel, shape, torch.bfloat16).asm["cubin"], tmp_path) <= 320  # of 1020 in registers


@pytest.mark.slow
@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="triton came without cuobjdump")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 64, 64, 8, 20, 3)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_a100_and_a_card_with_99_kib_of_shared_memory_are_enough(kernel, shape, capability, tmp_path, monkeypatch):
    monkeypatch.setattr(triton_plan, "launches_overlap", lambda: False)
    compiled = code(kernel, shape, torch.bfloat16, capability)
    assert compiled.metadata.shared <= 32 * 1024  # three programs at least share a multiprocessor's 100 KiB
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= 320


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_float32_products_are_summed_apart():
    """Triton likes to make total + a b one product that accumulates onto the total."""
    lines = code("attend_forward", SHAPES[0], torch.float32).asm["ttir"].splitlines()
    products = [line for line in lines if "tt.dot" in line]
    assert len(products) >= 3
    assert all("%cst" in line for line in products)  # they accumulate onto zeros


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 4, 1), (2, 7, 7, 8, 20, 6), (1, 64, 64, 8, 20, 3), (1, 128, 128, 8, 64, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_have_few_warps_and_fit_their_rows(shape, dtype):
    chosen = plan(shape, dtype)
    for kernel in KERNELS:
        tile, sizes = chosen.tile(kernel), chosen.constants
        assert tile.warps <= 2
        if kernel.startswith("attend"):
            assert sizes["GROUP"] % (tile.keys // sizes["KEY_COLS"]) == 0


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_scratch_is_linear_in_the_pixels(batch):
    scratch = []
    for side in (64, 128):
        chosen = plan((batch, side, side, 8, 20, 3), torch.bfloat16)
        scratch.append(chosen.heads_at_a_time * sum(chosen.operand_sizes + chosen.gradient_sizes))
    assert scratch[1] <= 4.2 * scratch[0]


@pytest.mark.parametrize(
    ("rows", "chosen"), [(0, None), (255, None), (256, (16, 16)), (1024, (32, 32)), (1016, (8, 127)), (257, None)]
)
def test_many_rows_are_summed_in_two_steps(rows, chosen):
    assert triton_plan.two_steps(rows) == chosen


@pytest.mark.parametrize(
    ("parts", "sums"),
    [
        ((1, 8, 1, 100), []),  # the parts are the sums
        ((0, 1, 1, 100), [(1, 0, 100)]),
        ((7, 1, 1, 100), [(1, 7, 100)]),
        ((1, 8, 5, 100), [(8, 5, 100)]),
        ((7, 8, 5, 100), [(56, 5, 100), (1, 7, 800)]),
        ((1024, 1, 1, 100), [(1, 32, 3200), (1, 32, 100)]),
        ((1024, 2, 3, 10), [(2048, 3, 10), (1, 32, 640), (1, 32, 20)]),
    ],
)
def test_parts_of_the_tables_gradients_are_summed_one_dimension_after_the_other(parts, sums):
    rows, heads, splits, numbers = parts
    chosen = triton_plan.table_sums(*parts)
    assert list(chosen) == sums
    names = triton_plan.sum_names(chosen)
    assert names[0] == "grad_tables"
    assert len(set(names)) == len(sums) + 1
    of_parts = max(1, rows * heads * splits * numbers)
    assert [*triton_plan.scratch_of_sums(chosen).items()][:1] == [("grad_tables", of_parts)] * bool(sums)
    if chosen:
        assert chosen[-1].outer * chosen[-1].numbers == heads * numbers


@pytest.mark.parametrize(
    ("shape", "together"),
    [
        ((128, 14, 14, 8, 20, 3), 4),
        ((2, 7, 7, 8, 20, 6), 8),
        ((2, 7, 7, 6, 20, 6), 2),  # heads of another image would not share its address
        ((2, 7, 7, 3, 20, 6), 1),
        ((2, 1, 1, 32, 20, 6), 8),
        ((2, 32, 32, 8, 20, 2), 2),
        ((2, 32, 32, 3, 20, 2), 1),
        ((2, 40, 40, 8, 20, 3), 1),
    ],
)
def test_heads_of_small_maps_are_packed_together(shape, together):
    chosen = plan(shape, torch.bfloat16)
    assert chosen.together == chosen.constants["TOGETHER"] == together
    line = chosen.tile("pack").queries // together
    assert chosen.programs("pack") * line >= chosen.pixels


@pytest.mark.parametrize(
    ("shape", "lines"),
    [
        ((2, 14, 14, 8, 20, 3), 1),  # 14 lines of queries, 16 rows of keys
        ((2, 20, 20, 8, 20, 3), 4),  # 20 and 72
        ((2, 16, 17, 3, 20, 3), 4),  # 17 and 48
        ((2, 40, 40, 8, 20, 3), 1),
        ((2, 1, 1, 8, 20, 3), 1),  # one and 8, but of eight heads at once
    ],
)
def test_programs_that_pack_few_lines_take_more_rows_of_keys(shape, lines):
    chosen = plan(shape, torch.bfloat16)
    assert chosen.key_lines == chosen.constants["KEY_LINES"] == lines
    assert chosen.programs("pack") * lines >= chosen.key_rows
    assert chosen.together * lines * chosen.constants["KEY_COLS"] <= max(64, chosen.tile("pack").queries)


@pytest.mark.parametrize(
    ("heads", "most", "programs", "chosen"),
    [
        (1024, 5000, 9, 1024),  # all at once
        (32, 6, 128, 4),  # 8 launches of 512 programs, not 5 of 768, which take twice as long each, and one of 256
        (32, 5, 1, 5),  # one wave a launch either way
        (7, 1, 1000, 1),
        (0, 3, 10, 1),
    ],
)
def test_heads_of_a_launch_fill_the_gpu(heads, most, programs, chosen):
    assert triton_plan.heads_at_a_time(heads, most, programs, 528) == chosen


@pytest.mark.parametrize(
    ("heads", "most", "steps", "chosen"),
    [
        (2048, 16, 16, 1),  # there are enough programs
        (4, 138, 1024, 128),  # 512 programs; 138 would be 552, and take two waves
        (64, 21, 50, 8),
        (1, 0, 1, 1),
    ],
)
def test_splits_of_a_head_fill_the_gpu(heads, most, steps, chosen):
    assert triton_plan.splits_of_a_head(heads, most, steps, 528) == chosen


@pytest.mark.parametrize("depth", range(1, triton_backend.MAX_DEPTH + 1))
def test_parts_of_a_key_do_not_overlap(depth):
    """MAIN channels of the head and no more; the rest, the edge, three parts of the log-sum-exp; the rows."""
    main, rows_at, tail = triton_plan.key_parts(depth)
    assert main <= depth
    assert depth - main + 4 <= rows_at
    assert rows_at + triton_plan.GROUP <= tail
    assert {part & (part - 1) for part in (main, tail)} == {0}  # powers of two


class Kernel:
    """Stands for a compiled kernel whose C function is `launch`, as triton's releases call it."""

    arg_names = ("qkv", "queries", "out", "first_image_head", "W", "H")
    function, packed_metadata = 77, (2, 1, 0)

    def __init__(self, release):
        self.compiled, self.started, self.run = [], [], {"3.6": Launcher36, "3.9": Launcher39}.get(release, Unknown)()
        self.run.launch = lambda *arguments: self.started.append(arguments)

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.compiled.append((grid, arguments, constants))
            return self

        return run


class Unknown:
    global_scratch_size = profile_scratch_size = 0


class Launcher36(Unknown):
    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, False, True, None, None, *rest)


class Launcher39(Unknown):
    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *rest):
        self.launch(x, y, z, stream, function, False, True, metadata, launch_metadata, enter, leave, None, None, rest)


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launch, "current_stream", lambda device: 5)


CONSTANTS = {"H": 3, "W": 4, "num_warps": 2}
WAYS = {
    "3.6": lambda arguments: (7, 1, 1, 5, 77, False, True, None, None, (2, 1, 0), None, None, None, *arguments),
    "3.9": lambda arguments: (7, 1, 1, 5, 77, False, True, (2, 1, 0), None, None, None, None, None, arguments),
}


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("release", WAYS)
def test_a_second_launch_goes_straight_to_tritons_c_function(release):
    """With addresses and constants in the order of the kernel's arguments; another alignment is compiled anew."""
    kernel = Kernel(release)
    launcher = triton_launch.Launcher(kernel, 7, CONSTANTS)
    tensors = [torch.zeros(64) for _ in range(3)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    launcher(tensors, (0,))
    assert [(grid, constants) for grid, _, constants in kernel.compiled] == [((7, 1, 1), CONSTANTS)]
    assert not kernel.started
    launcher(tensors, (8,))
    assert kernel.started == [WAYS[release]((*addresses, 8, 4, 3))]
    launcher([tensors[0][1:], *tensors[1:]], (0,))
    assert len(kernel.compiled) == 2


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("change", ["unknown release", "scratch"])
def test_a_launch_that_we_do_not_understand_goes_tritons_way(change):
    kernel = Kernel("3.9" if change == "scratch" else "4.0")
    kernel.run.global_scratch_size = 8 if change == "scratch" else 0
    launcher = triton_launch.Launcher(kernel, 7, CONSTANTS)
    tensors = [torch.zeros(64) for _ in range(3)]
    for first in (0, 8):
        launcher(tensors, (first,))
    assert not kernel.started
    assert kernel.compiled[1][1:] == ((*(tensor.data_ptr() for tensor in tensors), 8, 4, 3), {})


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("scratch", [{}, {"queries": 9}], ids=str)
def test_a_program_gives_float32_pieces_and_tensors_by_other_names(scratch):
    """By addresses as by tensors: the first call has these, the second those."""
    kernel = Kernel("3.6")
    kernel.arg_names = ("parts", "sums", "W", "H")
    launcher = triton_launch.Launcher(kernel, 7, CONSTANTS)
    steps = [triton_launch.Step(launcher, (), names) for names in (("first", "second"), ("second", "out"))]
    program = triton_launch.Program(steps, scratch, 2, {"first": 5, "second": 3})
    out = torch.zeros(64)
    for _ in range(2):
        program(torch.zeros(2, dtype=torch.bfloat16), {"out": out})
    ((_, (first, second), _),) = kernel.compiled
    assert [(piece.dtype, piece.numel()) for piece in (first, second)] == [(torch.float32, 5), (torch.float32, 3)]
    assert second.data_ptr() - first.data_ptr() == 32
    assert first.storage_offset() * 4 == 32 * len(scratch)
    arguments = [call[-4:-2] for call in kernel.started]  # before the constants
    assert arguments[0][1] == out.data_ptr()
    (_, begin), (_, end) = arguments[1:]
    assert (arguments[1][0] + 32, end) == (begin, out.data_ptr())
    assert arguments[2][0] == begin


@pytest.mark.usefixtures("on_a_gpu")
def test_a_program_without_scratch_allocates_nothing(monkeypatch):
    step = triton_launch.Step(triton_launch.Launcher(Kernel("3.6"), 7, CONSTANTS), (0,), ("qkv", "qkv", "qkv"))
    program, qkv = triton_launch.Program([step], {}, 4), torch.zeros(64)
    monkeypatch.setattr(torch.Tensor, "new_empty", None)
    for _ in range(2):
        program(qkv, {"qkv": qkv})
    assert len(step.launcher.kernel.started) == 1


@pytest.mark.usefixtures("on_a_gpu")
def test_hooks_of_a_profiler_see_every_launch():
    kernel = Kernel("3.9")
    launcher, program_kernel = triton_launch.Launcher(kernel, 7, CONSTANTS), Kernel("3.9")
    step = triton_launch.Step(triton_launch.Launcher(program_kernel, 7, CONSTANTS), (0,))
    program = triton_launch.Program([step], {"queries": 5}, 4)
    tensors, hook = [torch.zeros(64) for _ in range(3)], lambda metadata: None
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(3):
            launcher(tensors, (0,))
            program(tensors[0], {"qkv": tensors[0], "out": tensors[1]})
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(kernel.compiled) == len(program_kernel.compiled) == 3
    assert not kernel.started
    assert not program_kernel.started


@pytest.mark.usefixtures("on_a_gpu")
def test_a_program_starts_its_kernels_by_addresses_from_the_second_call_on(monkeypatch):
    kernels = Kernel("3.6"), Kernel("3.9")
    launchers = [triton_launch.Launcher(kernel, 7, CONSTANTS) for kernel in kernels]
    steps = [triton_launch.Step(launcher, (first,)) for first in (0, 4) for launcher in launchers]
    program = triton_launch.Program(steps, {"grads": 3, "queries": 9}, itemsize=2)
    qkv, out = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    buffers, new_empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda tensor, size: buffers.append(new_empty(tensor, size)) or buffers[-1]
    )
    program(qkv, {"out": out, "qkv": qkv})
    _, (first_qkv, queries, first_out, _), _ = kernels[0].compiled[0]
    assert (first_qkv is qkv, first_out is out) == (True, True)
    assert (queries.data_ptr() - buffers[0].data_ptr(), queries.numel(), queries.dtype) == (16, 9, torch.bfloat16)
    assert [len(kernel.started) for kernel in kernels] == [1, 1]  # of the second round: the first has compiled it
    program(qkv, {"out": out, "qkv": qkv})
    addresses = qkv.data_ptr(), buffers[1].data_ptr() + 16, out.data_ptr()
    assert [len(kernel.compiled) for kernel in kernels] == [1, 1]
    for kernel, release in zip(kernels, WAYS, strict=True):
        assert kernel.started[-2:] == [WAYS[release]((*addresses, first, 4, 3)) for first in (0, 4)]
    program(qkv[1:], {"out": out, "qkv": qkv[1:]})
    assert [len(kernel.compiled) for kernel in kernels] == [2, 2]
