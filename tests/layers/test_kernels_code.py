"""The kernels around the attention as triton compiles them for GPUs that are not here."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from aaconv.attention.triton_backend import INTERPRETED  # noqa: E402
from aaconv.layers import resampling  # noqa: E402
from aaconv.layers.kept_weights import BLOCK  # noqa: E402
from support.compiled_kernels import DISASSEMBLER, stack_bytes  # noqa: E402

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="here nothing is compiled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
KERNELS = ["halve", "halve_backward", "enlarge", "enlarge_backward"]
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def compiled(kernel, pointers, scalars, constants, capability=90):
    """As a first call compiles it: aligned pointers, and whole numbers of one are constants."""
    names = kernel.arg_names
    numbers = dict(zip([name for name in names if name not in {*pointers, *constants}], scalars, strict=True))
    fixed = {**constants, **{name: 1 for name, number in numbers.items() if number == 1}}
    signature = {name: "constexpr" if name in fixed else pointers.get(name, "i32") for name in names}
    multiples = [name for name in names if name in pointers or numbers.get(name, 1) % 16 == 0]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): fixed[name] for name in names if name in fixed},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


def resampled(name, shape, size, dtype=torch.bfloat16, capability=90, stride=None):
    call = resampling._call(name, shape, size, stride or shape[1], shape[1], dtype, -1)
    pointers = dict.fromkeys(("source", "out"), POINTERS[dtype])
    return compiled(call.launcher.kernel, pointers, call.scalars, call.launcher.constants, capability)


def accesses(code):
    """The widths, in bits, of what is read and written."""
    widths = {f"{op}.global.v4.b32": 128 for op in ("ld", "st")}
    lines = [line.strip() for line in code.asm["ptx"].splitlines()]
    found = [line for line in lines if ".global" in line and (" ld." in f" {line}" or " st." in f" {line}")]
    return [next((bits for name, bits in widths.items() if name in line), 0) for line in found]


@pytest.mark.slow
@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this triton brings no cuobjdump")
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("dtype", POINTERS, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills_and_sixteen_bytes_are_read_at_a_time(name, dtype, capability, tmp_path):
    code = resampled(name, (128, 128, 28, 28), (56, 56) if name == "halve_backward" else (14, 14), dtype, capability)
    assert stack_bytes(code.asm["cubin"], tmp_path) == 0
    assert set(accesses(code)) == {128}
    assert "atom" not in code.asm["ptx"]
    assert code.metadata.shared == 0


@pytest.mark.slow
def test_channels_of_a_wider_map_are_read_sixteen_bytes_at_a_time():
    assert set(accesses(resampled("enlarge_backward", (128, 8, 28, 28), (14, 14), stride=128))) == {128}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_sides_of_one_pixel_compile(name):
    """Triton makes constants of them, which have not all that numbers have."""
    for sides in ((1, 1), (1, 5), (5, 1)):
        resampled(name, (1, 3, *sides), sides if "halve" in name else (1, 1))
    resampled(name, (1, 1, 1, 1), (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(120 * 9 * 128, 328 * 128, 64), (0, 16, 1), (1, 1, 1)], ids=str)
def test_the_copy_of_the_weights_compiles(sizes):
    from aaconv.layers import kernels

    names = ("first", "second", "third")
    pointers = {**dict.fromkeys(names, "*fp32"), **{f"to_{name}": "*bf16" for name in names}}
    code = compiled(kernels.cast_three, pointers, sizes, {"BLOCK": BLOCK})
    if sizes[2] == 64:
        assert set(accesses(code)) == {128}
