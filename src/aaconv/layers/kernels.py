"""What a layer does around its attention where nothing is compiled: the Triton kernels alone.

Maps [batch, channels, height, width] are channels_last in memory: pixels one after the other, STRIDE elements apart,
the CHANNELS of a pixel side by side. So channels of a wider map are read and written in place. A program computes
PIXELS pixels of its result, AT_ONCE channels of each, in float32. Gradients are gathered, not scattered: no atomics,
the same bits every time. Sizes of the map are arguments: another compiles anew only where triton specialises for it.
"""

import triton
import triton.language as tl


@triton.jit
def find_pixels(pixels, height, width, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The image, row and column [PIXELS, 1] of this program's pixels, its channels [1, AT_ONCE], and which of both are
    there."""
    parts: tl.constexpr = (CHANNELS + AT_ONCE - 1) // AT_ONCE
    pixel = (tl.program_id(0) // parts * PIXELS + tl.arange(0, PIXELS))[:, None]
    channel = (tl.program_id(0) % parts * AT_ONCE + tl.arange(0, AT_ONCE))[None, :]
    line = pixel // width
    return line // height, line % height, pixel % width, channel, (pixel < pixels) & (channel < CHANNELS)


@triton.jit
def load_pixel(source, image, row, column, channel, there, height, width, STRIDE: tl.constexpr):
    """[PIXELS, AT_ONCE] of a map of height x width in float32, zero where `there` is false."""
    pixel = ((image * height + row) * width + column).to(tl.int64)
    return tl.load(source + pixel * STRIDE + channel, mask=there, other=0.0).to(tl.float32)


@triton.jit
def store_pixel(out, value, image, row, column, channel, there, height, width, STRIDE: tl.constexpr):
    pixel = ((image * height + row) * width + column).to(tl.int64)
    tl.store(out + pixel * STRIDE + channel, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def share_of_window(row, column, height, width):
    """1 / number of pixels that are on the map, of the 3 x 3 about every other one."""
    rows = tl.minimum(2 * row + 2, height) - tl.maximum(2 * row - 1, 0)
    columns = tl.minimum(2 * column + 2, width) - tl.maximum(2 * column - 1, 0)
    number = tl.maximum(rows * columns, 1).to(tl.float32)  # a window beyond the map has none
    return tl.div_rn(tl.full(number.shape, 1.0, tl.float32), number)


@triton.jit
def halve(
    source, out, pixels, height, width, new_height, new_width,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, PIXELS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out [new_height, new_width]: the averages over 3 x 3 about every other pixel; padding does not count."""
    image, y, x, channel, inside = find_pixels(pixels, new_height, new_width, CHANNELS, PIXELS, AT_ONCE)
    total = tl.zeros((PIXELS, AT_ONCE), tl.float32)
    for place in tl.static_range(9):
        row, column = 2 * y + place // 3 - 1, 2 * x + place % 3 - 1
        there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        total += load_pixel(source, image, row, column, channel, there, height, width, STRIDE)
    average = total * share_of_window(y, x, height, width)
    store_pixel(out, average, image, y, x, channel, inside, new_height, new_width, OUT_STRIDE)


@triton.jit
def load_share(
    source, image, y, x, channel, inside, height, width, new_height, new_width, DOWN, ACROSS, STRIDE: tl.constexpr
):  # fmt: skip
    """The gradient that a window, so many after that of row y and column x, has for each of its pixels."""
    row, column = y + DOWN, x + ACROSS
    there = inside & (row < height) & (column < width)
    grad = load_pixel(source, image, row, column, channel, there, height, width, STRIDE)
    return grad * share_of_window(row, column, new_height, new_width)


@triton.jit
def halve_backward(
    source, out, pixels, height, width, new_height, new_width,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, PIXELS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out [new_height, new_width], the gradient of what was halved, from that of the averages, [height, width]. An even
    pixel was in one window, an odd one also in the next: a window writes the pixel in its middle, and those after it.
    """
    image, y, x, channel, inside = find_pixels(pixels, height, width, CHANNELS, PIXELS, AT_ONCE)
    this = load_share(source, image, y, x, channel, inside, height, width, new_height, new_width, 0, 0, STRIDE)
    right = load_share(source, image, y, x, channel, inside, height, width, new_height, new_width, 0, 1, STRIDE)
    below = load_share(source, image, y, x, channel, inside, height, width, new_height, new_width, 1, 0, STRIDE)
    after = load_share(source, image, y, x, channel, inside, height, width, new_height, new_width, 1, 1, STRIDE)
    y, x = 2 * y, 2 * x
    wide, tall = inside & (x + 1 < new_width), inside & (y + 1 < new_height)
    store_pixel(out, this, image, y, x, channel, inside, new_height, new_width, OUT_STRIDE)
    store_pixel(out, this + right, image, y, x + 1, channel, wide, new_height, new_width, OUT_STRIDE)
    store_pixel(out, this + below, image, y + 1, x, channel, tall, new_height, new_width, OUT_STRIDE)
    total = (this + right) + (below + after)
    store_pixel(out, total, image, y + 1, x + 1, channel, wide & tall, new_height, new_width, OUT_STRIDE)


@triton.jit
def neighbours(new, new_length, length):
    """The two places of a side that a place of the resized one lies between, and the share of the second: pixels are
    squares, and the sides of both maps coincide (align_corners=False)."""
    doubled = tl.maximum((2 * new + 1) * length - new_length, 0)  # times new_length
    first = doubled // (2 * new_length)
    rest = (doubled % (2 * new_length)).to(tl.float32)
    # As IEEE has it: triton's own division may be two units off, and a quarter not a quarter.
    share = tl.div_rn(rest, tl.full(rest.shape, 2 * new_length, tl.float32))
    return first, tl.minimum(first + 1, length - 1), share


@triton.jit
def enlarge(
    source, out, pixels, height, width, new_height, new_width,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, PIXELS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out [new_height, new_width]: the map by bilinear interpolation."""
    image, y, x, channel, inside = find_pixels(pixels, new_height, new_width, CHANNELS, PIXELS, AT_ONCE)
    top, bottom, below = neighbours(y, new_height, height)
    left, right, beside = neighbours(x, new_width, width)
    a = load_pixel(source, image, top, left, channel, inside, height, width, STRIDE)
    b = load_pixel(source, image, top, right, channel, inside, height, width, STRIDE)
    c = load_pixel(source, image, bottom, left, channel, inside, height, width, STRIDE)
    d = load_pixel(source, image, bottom, right, channel, inside, height, width, STRIDE)
    value = (1 - below) * ((1 - beside) * a + beside * b) + below * ((1 - beside) * c + beside * d)
    store_pixel(out, value, image, y, x, channel, inside, new_height, new_width, OUT_STRIDE)


@triton.jit
def share_of(place, new, new_length, length):
    """What a place of the resized side takes of a place."""
    first, second, share = neighbours(new, new_length, length)
    return tl.where(first == place, 1 - share, 0.0) + tl.where(second == place, share, 0.0)


@triton.jit
def enlarge_backward(
    source, out, pixels, height, width, new_height, new_width, rows, columns,
    CHANNELS: tl.constexpr, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, PIXELS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out [new_height, new_width], the gradient of what was enlarged, from that of the result, [height, width]: at most
    rows x columns of its pixels took something of each."""
    image, y, x, channel, inside = find_pixels(pixels, new_height, new_width, CHANNELS, PIXELS, AT_ONCE)
    first_row = tl.maximum((2 * y - 1) * height + new_height, 0) // (2 * new_height)
    first_column = tl.maximum((2 * x - 1) * width + new_width, 0) // (2 * new_width)
    total = tl.zeros((PIXELS, AT_ONCE), tl.float32)
    for down in range(rows):
        row = first_row + down
        of_row = share_of(y, row, height, new_height)
        for across in range(columns):
            column = first_column + across
            share = of_row * share_of(x, column, width, new_width)
            there = inside & (row < height) & (column < width)
            total += share * load_pixel(source, image, row, column, channel, there, height, width, STRIDE)
    store_pixel(out, total, image, y, x, channel, inside, new_height, new_width, OUT_STRIDE)


@triton.jit
def cast_three(
    first, second, third, to_first, to_second, to_third, of_first, of_second, of_third, BLOCK: tl.constexpr
):  # fmt: skip
    """Three arrays of so many elements, cast: to_first[i] = first[i] and so on. A launch instead of three."""
    program = tl.program_id(0)
    programs_of_first, programs_of_second = tl.cdiv(of_first, BLOCK), tl.cdiv(of_second, BLOCK)
    if program < programs_of_first:
        cast_block(first, to_first, program, of_first, BLOCK)
    elif program < programs_of_first + programs_of_second:
        cast_block(second, to_second, program - programs_of_first, of_second, BLOCK)
    else:
        cast_block(third, to_third, program - programs_of_first - programs_of_second, of_third, BLOCK)


@triton.jit
def cast_block(source, to, block, number, BLOCK: tl.constexpr):
    place = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + place, tl.load(source + place, mask=place < number).to(to.dtype.element_ty), mask=place < number)
