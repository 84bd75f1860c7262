"""The last kernel of a backward: the parts that programs left of the tables' gradients, summed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def sum_rows(parts, sums, rows, numbers, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """[.., rows, numbers] -> [.., numbers], in float32 and in the same order every time. A program has BLOCK numbers of
    one of the sums."""
    blocks = (numbers + BLOCK - 1) // BLOCK
    one = (tl.program_id(0) // blocks).to(tl.int64)
    number = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, AT_ONCE)[:, None]
    parts += one * rows * numbers
    inside = (number < numbers)[None, :]
    total = tl.zeros([AT_ONCE, BLOCK], tl.float32)
    for first in range(0, rows, AT_ONCE):
        place = (first + row).to(tl.int64) * numbers + number[None, :]
        total += tl.load(parts + place, mask=(first + row < rows) & inside, other=0.0)
    tl.store(sums + one * numbers + number, tl.sum(total, 0), mask=number < numbers)
