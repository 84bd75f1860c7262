"""Fused local attention with relative positions, the forward: the Triton kernels alone.

A query sees the keys of a window, see windows.py. What it sees is a condition on the key's row and one on its column,
and so is the relative term. `window_pack` lays out, once for all the tiles that will read it, for each pixel of a head

    relative [LINES_H + LINES_W]   q . rel_h of row y at y % LINES_H, OUT for rows out of sight; the same of columns
    keys     [KEY]                 k | 1 | 1 | 1 | 0 ...
    values   [VALUE]               v | 1 | 1 | 0 ...

and for the backward

    queries  [KEY]                 q | -lse in 3 parts | 0 ...
    grads    [VALUE]               grad_out | -(grad_out . out) in 2 parts | 0 ...

A tile looks at no more than LINES_H rows, so that a row's logit is found by the row alone, out of sight or not: no
weight needs a mask. The ones sum the weights in the forward, and in the backward take off the log-sum-exp and
grad_out . out, where there is room for them. After the last pixel of a head comes one that sees nothing.

JOINT: small heads have keys and values in one row, queries and gradients in another, of KEY + VALUE elements

    keys     k[:KEY] | k[KEY:] | 1 | 1 | 1 | v | 1 | 1 | 0 ...
    queries  q[:KEY] | q[KEY:] | -lse in 3 parts | grad_out | -(grad_out . out) in 2 parts | 0 ...

so that 20 / 3 channels are 64 bytes. `values` and `grads` are then the last VALUE elements, and have VALUE_AT elements
before the values: products with these bring the rest of the keys as well.

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
def load_after(base, pixel_offset, valid, AT: tl.constexpr, DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr):
    """[pixels, DEPTH_PAD] of consecutive channels that begin at place AT, zero around them."""
    channel = tl.arange(0, DEPTH_PAD) - AT
    mask = valid[:, None] & ((channel >= 0) & (channel < DEPTH))[None, :]
    return tl.load(base + pixel_offset[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def store_after(base, pixel_offset, valid, value, AT: tl.constexpr, DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr):
    """Of values [pixels, DEPTH_PAD] the channels that begin at place AT."""
    channel = tl.arange(0, DEPTH_PAD) - AT
    mask = valid[:, None] & ((channel >= 0) & (channel < DEPTH))[None, :]
    tl.store(base + pixel_offset[:, None] + channel[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def keep_before(value, AT: tl.constexpr, KEPT: tl.constexpr):
    """The columns before AT (KEPT), or those from there on; zero elsewhere."""
    ROWS: tl.constexpr = value.shape[0]
    COLUMNS: tl.constexpr = value.shape[1]
    before = (tl.arange(0, COLUMNS) < AT)[None, :]
    zero = tl.zeros([ROWS, COLUMNS], value.dtype)
    return tl.where(before, value, zero) if KEPT else tl.where(before, zero, value)


@triton.jit
def load_packed(base, pixel, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """[pixels, WIDTH] of packed operands: all pixels exist."""
    return tl.load(base + (pixel * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :])


@triton.jit
def row_places(y0, LINES_H: tl.constexpr, ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """[ROWS]: where the logits for the rows from y0 on are. ALIGNED: y0 is a multiple of KEY_ROWS."""
    row = tl.arange(0, ROWS)
    if ALIGNED:
        return tl.multiple_of(y0 & (LINES_H - 1), KEY_ROWS) + row
    return (y0 + row) & (LINES_H - 1)


@triton.jit
def load_rows(
    relative, pixel, y0, LINES_H: tl.constexpr, LINES_W: tl.constexpr, KEY_ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """[queries, KEY_ROWS]: the logits for the rows from y0 on."""
    place = row_places(y0, LINES_H, KEY_ROWS, KEY_ROWS, ALIGNED)
    return tl.load(relative + (pixel * (LINES_H + LINES_W))[:, None] + place[None, :]).to(tl.float32)


@triton.jit
def load_columns(
    relative, pixel, x0, LINES_H: tl.constexpr, LINES_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr
):
    """[queries, KEY_ROWS * KEY_COLS]: the logits for the columns from x0 on, the same for every row."""
    QUERIES: tl.constexpr = pixel.shape[0]
    place = LINES_H + ((x0 + tl.arange(0, KEY_COLS)) & (LINES_W - 1))
    by_column = tl.load(relative + (pixel * (LINES_H + LINES_W))[:, None] + place[None, :]).to(tl.float32)
    spread = tl.broadcast_to(by_column[:, None, :], [QUERIES, KEY_ROWS, KEY_COLS])
    return tl.reshape(spread, [QUERIES, KEY_ROWS * KEY_COLS])


@triton.jit
def over_columns(by_row, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr):
    """[queries, KEY_ROWS] -> [queries, KEY_ROWS * KEY_COLS], the same for every column."""
    QUERIES: tl.constexpr = by_row.shape[0]
    spread = tl.broadcast_to(by_row[:, :, None], [QUERIES, KEY_ROWS, KEY_COLS])
    return tl.reshape(spread, [QUERIES, KEY_ROWS * KEY_COLS])


@triton.jit
def lines_in_sight(line, side, WINDOW: tl.constexpr, SHARED: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr):
    """[LINES]: which of the lines queries of one line see, none beyond the map, and which vectors these have."""
    query = line // APART
    length = tl.cdiv(side - line % APART, APART)
    first = first_seen(query, length, WINDOW, SHARED)
    place = (tl.arange(0, LINES) - first) & (LINES - 1)
    return (place < tl.where(line < side, WINDOW, 0)) & (first + place < length), first + place - query + (WINDOW - 1)


@triton.jit
def load_line(
    qkv, table, line, side, along, length, pixel, head, D: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    JOINT: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Queries of one line, in two parts if JOINT, and the vectors of the lines they see: they share these. Also which
    queries exist, and which lines are seen."""
    FIRST: tl.constexpr = KEY if JOINT else D
    exists = along < tl.where(line < side, length, 0)  # there may be more programs than lines
    seen, offset = lines_in_sight(line, side, WINDOW, SHARED, APART, LINES)
    qkv += head * D
    q = load_pixels(qkv, pixel * STRIDE, exists, FIRST, KEY)
    rest = load_pixels(qkv + FIRST, pixel * STRIDE, exists, D - FIRST, VALUE) if JOINT else q
    if TABLES_PER_HEAD:
        table += head * ((2 * WINDOW - 1) * D)
    vectors = load_pixels(table, offset * D, seen & RELATIVE, FIRST, KEY).to(q.dtype)
    more = load_pixels(table + FIRST, offset * D, seen & RELATIVE, D - FIRST, VALUE).to(q.dtype) if JOINT else vectors
    return q, rest, vectors, more, exists, seen


@triton.jit
def line_logits(
    q, rest, vectors, more, seen, JOINT: tl.constexpr, RELATIVE: tl.constexpr, KEY_SCALE: tl.constexpr,
    OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[queries, LINES]: relative logits of queries in one line for the lines they see."""
    if RELATIVE:
        logits = tl.dot(q, tl.trans(vectors), input_precision=PRECISION)
        if JOINT:
            logits = tl.dot(rest, tl.trans(more), logits, input_precision=PRECISION)
        logits *= KEY_SCALE
    else:
        QUERIES: tl.constexpr = q.shape[0]
        LINES: tl.constexpr = vectors.shape[0]
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
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, VALUE_AT: tl.constexpr,
    JOINT: tl.constexpr, LINES_H: tl.constexpr, LINES_W: tl.constexpr, RELATIVE: tl.constexpr,
    TABLES_PER_HEAD: tl.constexpr, KEY_SCALE: tl.constexpr, OUT: tl.constexpr, BACKWARD: tl.constexpr,
    LOG_SUM: tl.constexpr, DELTA: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """The operands of the attention, see above. A program takes LINE pixels of a row of the map and as many of a
    column, and loads them all before it stores anything: each hides the latency of the other."""
    ALL_LINES: tl.constexpr = LINES_H + LINES_W
    FIRST: tl.constexpr = KEY if JOINT else D  # channels of a key in its first part
    REST: tl.constexpr = D - FIRST
    pixels = height * width
    row_parts, column_parts = tl.cdiv(width, LINE), tl.cdiv(height, LINE)
    programs = tl.maximum(height * row_parts, width * column_parts)
    local_image_head, image_head, image, head = find_head(tl.program_id(0) // programs, first_image_head, HEADS)
    number = tl.program_id(0) % programs
    first = local_image_head * (pixels + 1)
    qkv += image * pixels * STRIDE
    relative += first * ALL_LINES
    keys += first * KEY_STRIDE
    queries += first * KEY_STRIDE
    values = keys + KEY if JOINT else values + first * VALUE_STRIDE
    grads = queries + KEY if JOINT else grads + first * VALUE_STRIDE
    row, along = number // row_parts, number % row_parts * LINE + tl.arange(0, LINE)
    pixel = row * width + along
    q, rest_of_q, vectors, more_vectors, exists, seen = load_line(
        qkv, rel_h, row, height, along, width, pixel, head, D, KEY, VALUE, JOINT, WINDOW_H, SHARED_H, APART_H, LINES_H,
        TABLES_PER_HEAD, RELATIVE, STRIDE,
    )  # fmt: skip
    column, down = number // column_parts, number % column_parts * LINE + tl.arange(0, LINE)
    pixel_down = down * width + column
    q_down, rest_down, vectors_down, more_down, exists_down, seen_down = load_line(
        qkv, rel_w, column, width, down, height, pixel_down, head, D, KEY, VALUE, JOINT, WINDOW_W, SHARED_W, APART_W,
        LINES_W, TABLES_PER_HEAD, RELATIVE, STRIDE,
    )  # fmt: skip
    at = qkv + (HEADS + head) * D
    k = load_pixels(at, pixel * STRIDE, exists, FIRST, KEY).to(tl.float32) * KEY_SCALE
    v = load_after(qkv + 2 * HEADS * D + head * DV, pixel * STRIDE, exists, VALUE_AT, DV, VALUE).to(tl.float32)
    place = tl.arange(0, KEY)[None, :]
    value = tl.arange(0, VALUE)[None, :]
    if JOINT:
        rest_of_k = load_pixels(at + FIRST, pixel * STRIDE, exists, REST, VALUE).to(tl.float32) * KEY_SCALE
        v = tl.where(value < REST, rest_of_k, v)
        v = tl.where((value >= REST) & (value < REST + 3), 1.0, v)
    elif LOG_SUM:
        k = tl.where((place >= D) & (place < D + 3), 1.0, k)
    v = tl.where((value >= VALUE_AT + DV) & (value < VALUE_AT + DV + 2), 1.0, v)
    if BACKWARD:
        offset = image * pixels * (HEADS * DV) + head * DV
        do = load_after(grad_out + offset, pixel * (HEADS * DV), exists, VALUE_AT, DV, VALUE)
        o = load_after(out + offset, pixel * (HEADS * DV), exists, VALUE_AT, DV, VALUE)
        if LOG_SUM:
            sums = lse + image_head * (2 * pixels) + pixel
            rest = -tl.load(sums, mask=exists, other=0.0) - tl.load(sums + pixels, mask=exists, other=0.0)
    by_row = line_logits(q, rest_of_q, vectors, more_vectors, seen, JOINT, RELATIVE, KEY_SCALE, OUT, PRECISION)
    by_column = line_logits(
        q_down, rest_down, vectors_down, more_down, seen_down, JOINT, RELATIVE, KEY_SCALE, OUT, PRECISION
    )
    store_pixels(relative, pixel * ALL_LINES, exists, by_row, LINES_H, LINES_H)
    store_pixels(relative + LINES_H, pixel_down * ALL_LINES, exists_down, by_column, LINES_W, LINES_W)
    store_pixels(keys, pixel * KEY_STRIDE, exists, k, KEY, KEY)
    store_pixels(values, pixel * VALUE_STRIDE, exists, v, VALUE, VALUE)
    if BACKWARD:
        dots = products_of_rows(do, o, EXACT, PRECISION)
        if DELTA:
            rounded_dots = dots.to(do.dtype)
            rest_of_dots = (dots - rounded_dots.to(tl.float32)).to(do.dtype)
            do = tl.where(value == VALUE_AT + DV, -rounded_dots[:, None], do)
            do = tl.where(value == VALUE_AT + DV + 1, -rest_of_dots[:, None], do)
        else:
            tl.store(delta + local_image_head * pixels + pixel, dots, mask=exists)
        if LOG_SUM:
            for part in tl.static_range(3):
                rounded = rest.to(q.dtype)
                if JOINT:
                    do = tl.where(value == REST + part, rounded[:, None], do)
                else:
                    q = tl.where(place == D + part, rounded[:, None], q)
                rest -= rounded.to(tl.float32)
        if JOINT:
            do = tl.where(value < REST, rest_of_q, do)
        store_pixels(queries, pixel * KEY_STRIDE, exists, q, KEY, KEY)
        store_pixels(grads, pixel * VALUE_STRIDE, exists, do, VALUE, VALUE)
    if BACKWARD and number == 0:  # the pixel that sees nothing
        some = tl.arange(0, LINES_H)
        tl.store(relative + pixels * ALL_LINES + some, tl.full([LINES_H], OUT, relative.dtype.element_ty))
        some = LINES_H + tl.arange(0, LINES_W)
        tl.store(relative + pixels * ALL_LINES + some, tl.full([LINES_W], OUT, relative.dtype.element_ty))
        some = tl.arange(0, KEY)
        tl.store(queries + pixels * KEY_STRIDE + some, tl.zeros([KEY], queries.dtype.element_ty))
        some = tl.arange(0, VALUE)
        tl.store(grads + pixels * VALUE_STRIDE + some, tl.zeros([VALUE], grads.dtype.element_ty))


@triton.jit
def mix_values(
    q, rest_of_q, keys, values, relative, pixel, columns_bias, row_begin, row_end, column_begin, rows, columns, origin,
    width, KEY: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, V_OUT: tl.constexpr,
    VALUE_AT: tl.constexpr, JOINT: tl.constexpr, DV: tl.constexpr, ONES: tl.constexpr, LINES_H: tl.constexpr,
    LINES_W: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, APART_H: tl.constexpr,
    APART_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr, ALIGNED: tl.constexpr,
    ONLINE: tl.constexpr,
):  # fmt: skip
    """[queries, V_OUT]: the values under weights exp2(logit - peak), not yet divided by their sum, that sum, the peak.
    ONLINE follows the largest logit from tile to tile, which is always safe; else nothing is taken off."""
    BLOCK_M: tl.constexpr = pixel.shape[0]
    mixed = tl.zeros([BLOCK_M, V_OUT], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf") if ONLINE else 0.0, tl.float32)
    by_row = load_rows(relative, pixel, row_begin, LINES_H, LINES_W, KEY_ROWS, ALIGNED)
    for y0 in range(row_begin, row_end, KEY_ROWS):
        _, _, key = tile_pixels(y0, column_begin, rows, columns, origin, width, APART_H, APART_W, KEY_ROWS, KEY_COLS)
        k = load_packed(keys, key, KEY, KEY_STRIDE)
        v = load_packed(values, key, V_OUT, VALUE_STRIDE)
        s = columns_bias + over_columns(by_row, KEY_ROWS, KEY_COLS)
        # Ahead: triton does it not for small loads.
        by_row = load_rows(relative, pixel, y0 + KEY_ROWS, LINES_H, LINES_W, KEY_ROWS, ALIGNED)
        s = add_product(s, q, tl.trans(k), PRECISION, EXACT)
        if JOINT:
            s = add_product(s, rest_of_q, tl.trans(v), PRECISION, EXACT)
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
        total = tl.sum(tl.where((tl.arange(0, V_OUT) == VALUE_AT + DV)[None, :], mixed, 0.0), 1)
    return mixed, total, peak


@triton.jit
def seen_by_tile(
    y0, x0, rows, columns, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr,
    SHARED_W: tl.constexpr, TILE_H: tl.constexpr, KEY_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The rows that the queries of a tile look at, from a multiple of KEY_ROWS on if ALIGNED, and the first of the
    columns."""
    row_begin = first_seen(y0, rows, WINDOW_H, SHARED_H)
    if ALIGNED:
        row_begin = row_begin // KEY_ROWS * KEY_ROWS
    last = tl.minimum(y0 + TILE_H, rows) - 1
    row_end = tl.minimum(first_seen(last, rows, WINDOW_H, SHARED_H) + WINDOW_H, rows)
    return row_begin, row_end, first_seen(x0, columns, WINDOW_W, SHARED_W)


@triton.jit(do_not_specialize=["first_image_head", "height", "width"])
def window_forward(
    qkv, keys, values, relative, out, lse, first_image_head, height, width,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEY: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, V_OUT: tl.constexpr, VALUE_AT: tl.constexpr,
    JOINT: tl.constexpr, ONES: tl.constexpr, LINES_H: tl.constexpr, LINES_W: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, ONLINE: tl.constexpr, SMALLEST_SUM: tl.constexpr,
    LARGEST_SUM: tl.constexpr,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, SHARED_H: tl.constexpr, SHARED_W: tl.constexpr,
    APART_H: tl.constexpr, APART_W: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, KEY_ROWS: tl.constexpr, KEY_COLS: tl.constexpr,
):  # fmt: skip
    """One program a tile of queries of an image-head. lse is [image_heads, 2, pixels]: what is taken off the logits and
    the logarithm of the sum over that, both in base 2. Where nothing is taken off and the sum comes out too large or
    too small, it is done again, online."""
    # The tiles inside a map begin at a multiple of KEY_ROWS, or else one of the first rows would be of no use.
    ALIGNED: tl.constexpr = WINDOW_H // 2 % KEY_ROWS == 0
    pixels = height * width
    local_image_head, image_head, image, head, y0, x0, rows, columns, origin = find_tile(
        first_image_head, height, width, HEADS, APART_H, APART_W, TILE_H, TILE_W
    )
    y, x, pixel = tile_pixels(y0, x0, rows, columns, origin, width, APART_H, APART_W, TILE_H, TILE_W)
    inside = (y < rows) & (x < columns)
    row_begin, row_end, column_begin = seen_by_tile(
        y0, x0, rows, columns, WINDOW_H, WINDOW_W, SHARED_H, SHARED_W, TILE_H, KEY_ROWS, ALIGNED
    )
    first = local_image_head * (pixels + 1)
    keys += first * KEY_STRIDE
    values = keys + KEY if JOINT else values + first * VALUE_STRIDE
    relative += first * (LINES_H + LINES_W)
    qkv += image * pixels * STRIDE + head * D
    q = load_pixels(qkv, pixel * STRIDE, inside, KEY if JOINT else D, KEY)
    rest = load_pixels(qkv + KEY, pixel * STRIDE, inside, D - KEY, V_OUT) if JOINT else q
    bias = load_columns(relative, pixel, column_begin, LINES_H, LINES_W, KEY_ROWS, KEY_COLS)
    mixed, total, peak = mix_values(
        q, rest, keys, values, relative, pixel, bias, row_begin, row_end, column_begin, rows, columns, origin, width,
        KEY, KEY_STRIDE, VALUE_STRIDE, V_OUT, VALUE_AT, JOINT, DV, ONES, LINES_H, LINES_W, SCALE, EXACT, PRECISION,
        APART_H, APART_W, KEY_ROWS, KEY_COLS, ALIGNED, ONLINE,
    )  # fmt: skip
    if not ONLINE:
        well = (total > SMALLEST_SUM) & (total < LARGEST_SUM)
        if tl.min(well.to(tl.int32), 0) == 0:  # also if it is not a number
            mixed, total, peak = mix_values(
                q, rest, keys, values, relative, pixel, bias, row_begin, row_end, column_begin, rows, columns, origin,
                width, KEY, KEY_STRIDE, VALUE_STRIDE, V_OUT, VALUE_AT, JOINT, DV, ONES, LINES_H, LINES_W, SCALE,
                EXACT, PRECISION, APART_H, APART_W, KEY_ROWS, KEY_COLS, ALIGNED, True,
            )  # fmt: skip
    # In float32 divided as IEEE has it: triton's own division may be two units off, as many as all the rest.
    result = tl.div_rn(mixed, tl.broadcast_to(total[:, None], mixed.shape)) if EXACT else mixed / total[:, None]
    out += image * pixels * (HEADS * DV) + head * DV
    store_after(out, pixel * (HEADS * DV), inside, result, VALUE_AT, DV, V_OUT)
    lse += image_head * (2 * pixels) + pixel
    tl.store(lse, peak, mask=inside)
    tl.store(lse + pixels, tl.log2(total), mask=inside)
