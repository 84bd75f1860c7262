"""Fused local attention with relative positions, the forward: the Triton kernels alone.

A query sees the keys of a window, see windows.py. What it sees is a condition on the key's row and one on its column,
and so is the relative term. `window_pack` lays out, once for all the tiles that will read it, for each pixel of a head

    relative [2, LINES]   q . rel_h of row y at y % LINES, OUT for rows out of sight; then the same of the columns
    keys     [D_PAD]      k | 1 | 1 | 1 | 0 ...
    values   [V_PAD]      v | 1 | 1 | 0 ...

and for the backward

    queries  [D_PAD]      q | -lse in 3 parts | 0 ...
    grads    [V_PAD]      grad_out | -(grad_out . out) in 2 parts | 0 ...

A tile looks at no more than LINES rows, so that a row's logit is found by the row alone, out of sight or not: no
weight needs a mask. The ones sum the weights in the forward, and in the backward take off the log-sum-exp and
grad_out . out, where there is room for them. After the last pixel of a head comes one that sees nothing.

The others walk over tiles of TILE_H x TILE_W queries (keys in the keys' kernel), each with the part of the map that
its windows cover, read in place. A dilation takes the map apart into APART_H x APART_W maps of every so many pixels,
which never see each other.

As in triton_kernels, logits are in base 2: in half precision keys and relative logits bring the factor KEY_SCALE, in
float32 SCALE holds it. Sizes of the map are arguments, not constants: another size does not compile anew.
"""

import triton
import triton.language as tl

from .triton_kernels import add_product
from .triton_pack import find_head, load_pixels, store_pixels


@triton.jit
def first_seen(query, length, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """The first key of a query's window along a side; SHARED neighbours have one window (windows.Axis.start)."""
    middle = tl.minimum(query // SHARED * SHARED + SHARED // 2, length - 1)
    return tl.maximum(tl.minimum(middle - WINDOW // 2, length - WINDOW), 0)


@triton.jit
def find_tile(
    first_image_head, height, width, HEADS: tl.constexpr, APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """The image-head of this program, see find_head, and of its tile the first row and column, the sides of the map it
    is in, and where that begins. A head has the tiles of all the maps that a dilation makes of one."""
    down, across = tl.cdiv(tl.cdiv(height, APART_H), TILE_H), tl.cdiv(tl.cdiv(width, APART_W), TILE_W)
    maps_across = tl.minimum(APART_W, width)  # beyond there would be maps without pixels
    tiles = down * across * tl.minimum(APART_H, height) * maps_across
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // tiles, first_image_head, HEADS)
    number = tl.program_id(0) % tiles
    apart, tile = number // (down * across), number % (down * across)
    above, left = apart // maps_across, apart % maps_across
    rows, columns = tl.cdiv(height - above, APART_H), tl.cdiv(width - left, APART_W)
    y0, x0 = tile // across * TILE_H, tile % across * TILE_W
    return local_image_head, image_head, image, head, y0, x0, rows, columns, above * width + left


@triton.jit
def tile_pixels(
    y0, x0, rows, columns, origin, width, APART_H: tl.constexpr, APART_W: tl.constexpr, TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
):  # fmt: skip
    """The rows, columns and pixels of a tile; the last of the map stands for pixels beyond it."""
    slot = tl.arange(0, TILE_H * TILE_W)
    y, x = y0 + slot // TILE_W, x0 + slot % TILE_W
    pixel = origin + tl.minimum(y, rows - 1) * (APART_H * width) + tl.minimum(x, columns - 1) * APART_W
    return y, x, pixel


@triton.jit
def load_packed(base, pixel, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """[pixels, WIDTH] of packed operands: all pixels exist."""
    return tl.load(base + (pixel * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :])


@triton.jit
def load_rows(relative, pixel, y0, LINES: tl.constexpr, KEY_ROWS: tl.constexpr):
    """[queries, KEY_ROWS]: the logits for the rows from y0 on, a multiple of KEY_ROWS."""
    first = tl.multiple_of(y0 & (LINES - 1), KEY_ROWS)
    return load_packed(relative + first, pixel, KEY_ROWS, 2 * LINES).to(tl.float32)


@triton.jit
def load_columns(relative, pixel, x0, LINES: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr):
    """[queries, KEY_ROWS * KEY_COLS]: the logits for the columns from x0 on, the same for every row."""
    QUERIES: tl.constexpr = pixel.shape[0]
    place = (x0 + tl.arange(0, KEY_COLS)) & (LINES - 1)
    by_column = tl.load(relative + LINES + (pixel * (2 * LINES))[:, None] + place[None, :]).to(tl.float32)
    spread = tl.broadcast_to(by_column[:, None, :], [QUERIES, KEY_ROWS, KEY_COLS])
    return tl.reshape(spread, [QUERIES, KEY_ROWS * KEY_COLS])


@triton.jit
def over_columns(by_row, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr):
    """[queries, KEY_ROWS] -> [queries, KEY_ROWS * KEY_COLS], the same for every column."""
    QUERIES: tl.constexpr = by_row.shape[0]
    spread = tl.broadcast_to(by_row[:, :, None], [QUERIES, KEY_ROWS, KEY_COLS])
    return tl.reshape(spread, [QUERIES, KEY_ROWS * KEY_COLS])


@triton.jit
def line_logits(
    q, table, line, side, head, D: tl.constexpr, D_PAD: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    APART: tl.constexpr, LINES: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr,
    KEY_SCALE: tl.constexpr, OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[queries, LINES]: relative logits of queries in one line for the lines they see. They share the vectors."""
    query = line // APART
    length = tl.cdiv(side - line % APART, APART)
    first = first_seen(query, length, WINDOW, SHARED)
    place = (tl.arange(0, LINES) - first) & (LINES - 1)
    seen = (place < WINDOW) & (first + place < length)
    if RELATIVE:
        if TABLES_PER_HEAD:
            table += head * ((2 * WINDOW - 1) * D)
        vectors = load_pixels(table, (first + place - query + (WINDOW - 1)) * D, seen, D, D_PAD).to(q.dtype)
        logits = tl.dot(q, tl.trans(vectors), input_precision=PRECISION) * KEY_SCALE
    else:
        QUERIES: tl.constexpr = q.shape[0]
        logits = tl.zeros([QUERIES, LINES], tl.float32)
    return tl.where(seen[None, :], logits, OUT)


@triton.jit
def products_of_rows(a, b, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """The product of each row with the other's. In float32 summed as the products of gradients with values are: with
    one key in sight the two must cancel to the last digit."""
    if EXACT:
        row = tl.arange(0, a.shape[0])
        products = tl.dot(a, tl.trans(b), input_precision=PRECISION)
        return tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1)
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_pack(
    qkv, rel_h, rel_w, out, lse, grad_out, queries, keys, values, relative, grads, delta,
    first_image_head, height, width,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    V_PAD: tl.constexpr, LINES: tl.constexpr, RELATIVE: tl.constexpr, TABLES_PER_HEAD: tl.constexpr,
    KEY_SCALE: tl.constexpr, OUT: tl.constexpr, BACKWARD: tl.constexpr, LOG_SUM: tl.constexpr, DELTA: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """The operands of the attention, see above. One program LINE pixels of a row of the map, or of a column."""
    pixels = height * width
    row_parts, column_parts = tl.cdiv(width, LINE), tl.cdiv(height, LINE)
    programs = height * row_parts + width * column_parts
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // programs, first_image_head, HEADS)
    number = tl.program_id(0) % programs
    of_row = number < height * row_parts
    number = tl.where(of_row, number, number - height * row_parts)
    parts = tl.where(of_row, row_parts, column_parts)
    line = number // parts
    along = number % parts * LINE + tl.arange(0, LINE)
    exists = along < tl.where(of_row, width, height)
    pixel = tl.where(of_row, line * width + along, along * width + line)
    first = local_image_head * (pixels + 1)
    qkv += image * pixels * STRIDE
    relative += first * (2 * LINES)
    queries += first * D_PAD
    q = load_pixels(qkv + head * D, pixel * STRIDE, exists, D, D_PAD)
    if of_row:
        k = load_pixels(qkv + (HEADS + head) * D, pixel * STRIDE, exists, D, D_PAD).to(tl.float32) * KEY_SCALE
        v = load_pixels(qkv + 2 * HEADS * D + head * DV, pixel * STRIDE, exists, DV, V_PAD).to(tl.float32)
        by_row = line_logits(
            q, rel_h, line, height, head, D, D_PAD, WINDOW_H, SHARED_H, APART_H, LINES, TABLES_PER_HEAD, RELATIVE,
            KEY_SCALE, OUT, PRECISION,
        )  # fmt: skip
        depth = tl.arange(0, D_PAD)[None, :]
        if LOG_SUM:
            k = tl.where((depth >= D) & (depth < D + 3), 1.0, k)
        value = tl.arange(0, V_PAD)[None, :]
        v = tl.where((value >= DV) & (value < DV + 2), 1.0, v)
        store_pixels(keys + first * D_PAD, pixel * D_PAD, exists, k, D_PAD, D_PAD)
        store_pixels(values + first * V_PAD, pixel * V_PAD, exists, v, V_PAD, V_PAD)
        store_pixels(relative, pixel * (2 * LINES), exists, by_row, LINES, LINES)
        if BACKWARD:
            if LOG_SUM:
                sums = lse + image_head * (2 * pixels) + pixel
                rest = -tl.load(sums, mask=exists, other=0.0) - tl.load(sums + pixels, mask=exists, other=0.0)
                with_sums = q.to(tl.float32)
                for part in tl.static_range(3):
                    rounded = rest.to(q.dtype).to(tl.float32)
                    with_sums = tl.where(depth == D + part, rounded[:, None], with_sums)
                    rest -= rounded
                store_pixels(queries, pixel * D_PAD, exists, with_sums, D_PAD, D_PAD)
            else:
                store_pixels(queries, pixel * D_PAD, exists, q, D_PAD, D_PAD)
            offset = image * pixels * (HEADS * DV) + head * DV
            do = load_pixels(grad_out + offset, pixel * (HEADS * DV), exists, DV, V_PAD)
            o = load_pixels(out + offset, pixel * (HEADS * DV), exists, DV, V_PAD)
            dots = products_of_rows(do, o, EXACT, PRECISION)
            if DELTA:
                rounded_dots = dots.to(do.dtype)
                rest_of_dots = (dots - rounded_dots.to(tl.float32)).to(do.dtype)
                do = tl.where(value == DV, -rounded_dots[:, None], do)
                do = tl.where(value == DV + 1, -rest_of_dots[:, None], do)
            else:
                tl.store(delta + local_image_head * pixels + pixel, dots, mask=exists)
            store_pixels(grads + first * V_PAD, pixel * V_PAD, exists, do, V_PAD, V_PAD)
    else:
        by_column = line_logits(
            q, rel_w, line, width, head, D, D_PAD, WINDOW_W, SHARED_W, APART_W, LINES, TABLES_PER_HEAD, RELATIVE,
            KEY_SCALE, OUT, PRECISION,
        )  # fmt: skip
        store_pixels(relative + LINES, pixel * (2 * LINES), exists, by_column, LINES, LINES)
    if BACKWARD and tl.program_id(0) % programs == 0:  # the pixel that sees nothing
        some = tl.arange(0, 2 * LINES)
        tl.store(relative + pixels * (2 * LINES) + some, tl.full([2 * LINES], OUT, relative.dtype.element_ty))
        some = tl.arange(0, D_PAD)
        tl.store(queries + pixels * D_PAD + some, tl.zeros([D_PAD], queries.dtype.element_ty))
        some = tl.arange(0, V_PAD)
        tl.store(grads + (first + pixels) * V_PAD + some, tl.zeros([V_PAD], grads.dtype.element_ty))


@triton.jit
def mix_values(
    q, keys, values, relative, pixel, columns_bias, row_begin, row_end, column_begin, rows, columns, origin, width,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr, V_OUT: tl.constexpr, DV: tl.constexpr, ONES: tl.constexpr,
    LINES: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, APART_H: tl.constexpr,
    APART_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    """[queries, V_OUT]: the values under weights exp2(logit - peak), not yet divided by their sum, that sum, the peak.
    ONLINE follows the largest logit from tile to tile, which is always safe; else nothing is taken off."""
    BLOCK_M: tl.constexpr = pixel.shape[0]
    mixed = tl.zeros([BLOCK_M, V_OUT], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf") if ONLINE else 0.0, tl.float32)
    by_row = load_rows(relative, pixel, row_begin, LINES, KEY_ROWS)
    for y0 in range(row_begin, row_end, KEY_ROWS):
        _, _, key = tile_pixels(y0, column_begin, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS)
        k = load_packed(keys, key, D_PAD, D_PAD)
        v = load_packed(values, key, V_OUT, V_PAD)
        s = columns_bias + over_columns(by_row, KEY_ROWS, KEY_COLS)
        by_row = load_rows(relative, pixel, y0 + KEY_ROWS, LINES, KEY_ROWS)  # ahead: triton does it not for small loads
        s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
        if ONLINE:
            new_peak = tl.maximum(peak, tl.max(s, 1) * SCALE)
            fade = tl.exp2(peak - new_peak)
            mixed *= fade[:, None]
            total *= fade
            peak = new_peak
        if ONLINE:
            s = s * SCALE - peak[:, None]
            if EXACT:  # fused with the product, a difference of two OUTs is not zero but the rounding of one of them
                s = tl.minimum(s, 0.0)
        p = tl.exp2(s)
        mixed = add_product(mixed, p.to(v.dtype), v, PRECISION, EXACT)
        if not ONES:
            total += tl.sum(p, 1)
    if ONES:  # then the sum stands beside the mixed values
        total = tl.sum(tl.where((tl.arange(0, V_OUT) == DV)[None, :], mixed, 0.0), 1)
    return mixed, total, peak


@triton.jit
def seen_by_tile(
    y0, x0, rows, columns, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr,
    SHARED_W: tl.constexpr, TILE_H: tl.constexpr, KEY_ROWS: tl.constexpr,
):  # fmt: skip
    """The rows that the queries of a tile look at, from a multiple of KEY_ROWS on, and the first of the columns."""
    row_begin = first_seen(y0, rows, WINDOW_H, SHARED_H) // KEY_ROWS * KEY_ROWS
    last = tl.minimum(y0 + TILE_H, rows) - 1
    row_end = tl.minimum(first_seen(last, rows, WINDOW_H, SHARED_H) + WINDOW_H, rows)
    return row_begin, row_end, first_seen(x0, columns, WINDOW_W, SHARED_W)


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_forward(
    qkv, keys, values, relative, out, lse, first_image_head, height, width,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    V_PAD: tl.constexpr, V_OUT: tl.constexpr, ONES: tl.constexpr, LINES: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, ONLINE: tl.constexpr,
    SMALLEST_SUM: tl.constexpr, LARGEST_SUM: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """One program a tile of queries of an image-head. lse is [image_heads, 2, pixels]: what is taken off the logits and
    the logarithm of the sum over that, both in base 2. Where nothing is taken off and the sum comes out too large or
    too small, it is done again, online."""
    pixels = height * width
    local_image_head, image_head, image, head, y0, x0, rows, columns, origin = find_tile(
        first_image_head, height, width, HEADS, APART_H, APART_W, TILE_H, TILE_W
    )
    y, x, pixel = tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H, TILE_W)
    inside = (y < rows) & (x < columns)
    row_begin, row_end, column_begin = seen_by_tile(
        y0, x0, rows, columns, WINDOW_H, WINDOW_W, SHARED_H, SHARED_W, TILE_H, KEY_ROWS
    )
    first = local_image_head * (pixels + 1)
    keys += first * D_PAD
    values += first * V_PAD
    relative += first * (2 * LINES)
    q = load_pixels(qkv + image * pixels * STRIDE + head * D, pixel * STRIDE, inside, D, D_PAD)
    bias = load_columns(relative, pixel, column_begin, LINES, KEY_ROWS, KEY_COLS)
    mixed, total, peak = mix_values(
        q, keys, values, relative, pixel, bias, row_begin, row_end, column_begin, rows, columns, origin, width,
        D_PAD, V_PAD, V_OUT, DV, ONES, LINES, SCALE, EXACT, PRECISION, APART_H, APART_W, KEY_ROWS, KEY_COLS, ONLINE,
    )  # fmt: skip
    if not ONLINE:
        well = (total > SMALLEST_SUM) & (total < LARGEST_SUM)
        if tl.min(well.to(tl.int32), 0) == 0:  # also if it is not a number
            mixed, total, peak = mix_values(
                q, keys, values, relative, pixel, bias, row_begin, row_end, column_begin, rows, columns, origin, width,
                D_PAD, V_PAD, V_OUT, DV, ONES, LINES, SCALE, EXACT, PRECISION, APART_H, APART_W, KEY_ROWS, KEY_COLS,
                True,
            )  # fmt: skip
    # In float32 divided as IEEE has it: triton's own division may be two units off, as many as all the rest.
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], mixed.shape)) if EXACT else mixed / total[:, None]
    store_pixels(out + image * pixels * (HEADS * DV) + head * DV, pixel * (HEADS * DV), inside, result, DV, V_OUT)
    lse += image_head * (2 * pixels) + pixel
    tl.store(lse, peak, mask=inside)
    tl.store(lse + pixels, tl.log2(total), mask=inside)
