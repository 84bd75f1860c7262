"""The first of the fused kernels, which lays out the operands of the attention, and how the others load them.

A logit is q_i . k_j + rows_i[jy] + cols_i[jx]: a query has H + W relative logits beside its product with the keys, and
each key adds two of them. Matrix products take depths of 16, so a head of 20 channels leaves 12 unused: they carry the
rows. `pack` lays out, once for all the tiles that will read it,

    queries  [pixel, GROUPS * TAIL + COLUMNS]   GROUPS times: q[MAIN:] | OUTSIDE | -lse in 3 parts | 0 ... |
                                                GROUP of the rows | 0 ...; then cols[0 : W] | 0 ...
    keys     [strip, row, column, MAIN + TAIL]  k | 1 where the slot is beyond the map | 1 | 1 | 1 | 0 ... |
                                                one-hot of row % GROUP
    values   [strip, row, column, VALUES]       v | 1 | 1 | 0 ... (without the ones if they would make it twice as wide)

with keys in strips of KEY_COLS columns, so that a tile of KEY_ROWS x KEY_COLS keys is one piece of memory. k, rows and
cols are multiplied by KEY_SCALE. The log-sum-exp is there for the backward, and not in float32 (LOG_SUM): three parts
of 16 bits hold it as float32 does.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_the_next_begin(OVERLAP: tl.constexpr):
    """Programs of the next kernel may take the places that this one's leave free."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_the_last(OVERLAP: tl.constexpr):
    """Until the kernel before this one has ended, and what it wrote can be read."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def load_pixels(base, pixel_offset, valid, DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr):
    """[pixels, DEPTH_PAD] of consecutive channels, zero outside."""
    depth = tl.arange(0, DEPTH_PAD)
    mask = valid[:, None] & (depth < DEPTH)[None, :]
    return tl.load(base + pixel_offset[:, None] + depth[None, :], mask=mask, other=0.0)


@triton.jit
def store_pixels(base, pixel_offset, valid, value, DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr):
    depth = tl.arange(0, DEPTH_PAD)
    mask = valid[:, None] & (depth < DEPTH)[None, :]
    tl.store(base + pixel_offset[:, None] + depth[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(base, row, valid, STRIDE: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """[rows, WIDTH] of packed operands; without a mask where all rows exist."""
    pointers = base + (row * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def load_slots(base, SLOTS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """[SLOTS, WIDTH] of packed keys or values: all slots exist."""
    return tl.load(base + (tl.arange(0, SLOTS) * STRIDE)[:, None] + tl.arange(0, WIDTH)[None, :])


@triton.jit
def load_columns(
    queries, pixel, inside, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, KEY_ROWS: tl.constexpr,
    KEY_COLS: tl.constexpr, WHOLE: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, KEY_ROWS * KEY_COLS]: the relative logits of a strip's columns, the same for all its rows."""
    if RELATIVE:
        columns = load_rows(queries, pixel, inside, STRIDE, KEY_COLS, WHOLE).to(tl.float32)
    else:
        columns = tl.zeros([BLOCK_M, KEY_COLS], tl.float32)
    columns = tl.broadcast_to(columns[:, None, :], [BLOCK_M, KEY_ROWS, KEY_COLS])
    return tl.reshape(columns, [BLOCK_M, KEY_ROWS * KEY_COLS])


@triton.jit
def load_tile(keys, first, SLOTS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """[SLOTS, TAIL] and [SLOTS, MAIN] of the keys from slot `first` on; without a main part the tail twice."""
    tail = load_slots(keys + first * (MAIN + TAIL) + MAIN, SLOTS, MAIN + TAIL, TAIL)
    main = load_slots(keys + first * (MAIN + TAIL), SLOTS, MAIN + TAIL, MAIN) if MAIN > 0 else tail
    return tail, main


@triton.jit
def find_head(number, first_image_head, HEADS: tl.constexpr):
    """Of the image-head with that number in this launch: the number, that among all, its image and its head."""
    local_image_head = number.to(tl.int64)  # int64: a batch may hold more than 2**31 elements
    image_head = local_image_head + first_image_head
    return local_image_head, image_head, image_head // HEADS, (image_head % HEADS).to(tl.int32)


@triton.jit
def load_line(
    qkv, table, image, head, number,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    PADDED: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Queries of one image row (ROWS) or column, of as many heads as go TOGETHER, and what they are multiplied with.
    In a line all queries have the same relative vectors for the same places, so that nothing needs to be skewed.

    Returns the queries [BLOCK_M, D_PAD], which of the heads they are of, their pixels, which of them exist, and the
    factors [PADDED, D_PAD].
    """
    LINE: tl.constexpr = BLOCK_M // TOGETHER
    length: tl.constexpr = W if ROWS else H  # of a line
    side: tl.constexpr = H if ROWS else W  # how many lines there are, and so places across them
    blocks: tl.constexpr = (length + LINE - 1) // LINE
    line = number // blocks
    which = tl.arange(0, BLOCK_M) // LINE
    along = number % blocks * LINE + tl.arange(0, BLOCK_M) % LINE
    pixel = line * W + along if ROWS else along * W + line
    there = along < tl.where(line < side, length, 0)  # there may be more programs than lines
    q = load_pixels(qkv + image * STRIDE_B + head * D, which * D + pixel * STRIDE_P, there, D, D_PAD)

    wide = tl.arange(0, PADDED)
    depth = tl.arange(0, D_PAD)[None, :]
    part = wide % TAIL if ROWS else wide
    place = (wide // TAIL) * GROUP + part - ROWS_AT if ROWS else wide
    known = place < tl.where(line < side, side, 0)
    if ROWS:
        known = known & (part >= ROWS_AT) & (part < ROWS_AT + GROUP)
    vectors = table + (head * ((2 * side - 1) * D) if TABLES_PER_HEAD else 0) + (side - 1 - line) * D
    factors = tl.load(
        vectors + place[:, None] * D + depth, mask=(known & RELATIVE)[:, None] & (depth < D), other=0.0
    ).to(q.dtype)  # fmt: skip
    if ROWS:  # unit vectors bring the last channels of q to their places
        factors = tl.where((part < D - MAIN)[:, None] & (depth == (MAIN + part)[:, None]), 1.0, factors).to(q.dtype)
    return q, which, pixel, there, factors


@triton.jit(do_not_specialize=["first_image_head"])
def pack(
    qkv, rel_h, rel_w, queries, keys, values, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, KEY: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr, KEY_COLS: tl.constexpr, STRIPS: tl.constexpr,
    TAILS_PADDED: tl.constexpr, COLUMNS_PADDED: tl.constexpr, TABLES_PER_HEAD: tl.constexpr, RELATIVE: tl.constexpr,
    OUTSIDE: tl.constexpr, KEY_SCALE: tl.constexpr, LOG_SUM: tl.constexpr, ONES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, TOGETHER: tl.constexpr, KEY_LINES: tl.constexpr, PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The operands of the attention, see above. A program takes BLOCK_M queries of an image row, BLOCK_M queries of an
    image column and KEY_LINES rows of a strip of keys, and loads them all before it stores anything: each hides the
    latency of the others. So many PROGRAMS are enough for all three. The heads of an image that go TOGETHER share the
    relative vectors: on a small map a line of one would be too short, and to prepare them takes as long as the rest."""
    STRIDE: tl.constexpr = GROUPS * TAIL + COLUMNS
    ROWS: tl.constexpr = GROUPS * GROUP
    let_the_next_begin(OVERLAP)
    first_of_these = tl.program_id(0) // PROGRAMS * TOGETHER
    local_image_head, image_head, image, head = find_head(first_of_these, first_image_head, HEADS)
    number = tl.program_id(0) % PROGRAMS

    q, which, pixel, there, factors = load_line(
        qkv, rel_h, image, head, number, STRIDE_B, STRIDE_P, H, W, D, D_PAD, MAIN, TAIL, ROWS_AT, GROUP,
        TAILS_PADDED, TABLES_PER_HEAD, RELATIVE, True, BLOCK_M, TOGETHER,
    )  # fmt: skip
    if RELATIVE:
        q_down, _, pixel_down, there_down, factors_down = load_line(
            qkv, rel_w, image, head, number, STRIDE_B, STRIDE_P, H, W, D, D_PAD, MAIN, TAIL, ROWS_AT, GROUP,
            COLUMNS_PADDED, TABLES_PER_HEAD, RELATIVE, False, BLOCK_M, TOGETHER,
        )  # fmt: skip
    if LOG_SUM:
        lse += image_head * (2 * H * W) + which * (2 * H * W) + pixel
        rest = -tl.load(lse, mask=there, other=0.0) - tl.load(lse + H * W, mask=there, other=0.0)
    KEYS: tl.constexpr = KEY_LINES * KEY_COLS
    of_key = tl.arange(0, TOGETHER * KEYS) // KEYS
    key = tl.arange(0, TOGETHER * KEYS) % KEYS
    line = number if KEY_LINES == 1 else number * KEY_LINES + key // KEY_COLS
    jy = line % ROWS
    jx = line // ROWS * KEY_COLS + key % KEY_COLS
    on_map = jx < tl.where(jy < H, W, 0)
    # Said, because triton takes the remainders above for multiples, and then loads more at once than is aligned.
    place = tl.multiple_of((jy * W + jx) * STRIDE_P, STRIDE_P & -STRIDE_P)
    k = load_pixels(qkv + image * STRIDE_B + (HEADS + head) * D, of_key * D + place, on_map, D, KEY)
    v = load_pixels(qkv + image * STRIDE_B + 2 * HEADS * D + head * DV, of_key * DV + place, on_map, DV, VALUES)

    part = tl.arange(0, TAILS_PADDED) % TAIL
    packed = tl.dot(q, tl.trans(factors), input_precision=PRECISION)
    packed *= tl.where(part < ROWS_AT, 1.0, KEY_SCALE)[None, :]
    packed = tl.where((part == D - MAIN)[None, :], OUTSIDE, packed)
    if LOG_SUM:
        for digits in tl.static_range(3):
            rounded = rest.to(q.dtype).to(tl.float32)
            packed = tl.where((part == D - MAIN + 1 + digits)[None, :], rounded[:, None], packed)
            rest -= rounded
    queries += local_image_head * (H * W * STRIDE)
    pixel += which * (H * W)
    store_pixels(queries, pixel * STRIDE, there, packed, GROUPS * TAIL, TAILS_PADDED)
    if RELATIVE:
        packed = tl.dot(q_down, tl.trans(factors_down), input_precision=PRECISION) * KEY_SCALE
        pixel_down += which * (H * W)
        store_pixels(queries + GROUPS * TAIL, pixel_down * STRIDE, there_down, packed, COLUMNS, COLUMNS_PADDED)

    slot = number * KEYS + key
    exists = slot < STRIPS * ROWS * KEY_COLS
    slot += of_key * (STRIPS * ROWS * KEY_COLS)
    depth = tl.arange(0, KEY)[None, :]
    k = tl.where(depth == D, tl.where(on_map, 0.0, 1.0)[:, None], k.to(tl.float32) * KEY_SCALE)
    k = tl.where((depth > D) & (depth <= D + 3), 1.0, k)
    row = jy % GROUP if KEY_LINES == 1 else (jy % GROUP)[:, None]
    k = tl.where(depth - (MAIN + ROWS_AT) == row, 1.0, k)
    keys += local_image_head * (STRIPS * ROWS * KEY_COLS * (MAIN + TAIL))
    store_pixels(keys, slot * (MAIN + TAIL), exists, k, MAIN + TAIL, KEY)
    depth = tl.arange(0, VALUES)[None, :]
    if ONES:
        v = tl.where((depth == DV) | (depth == DV + 1), 1.0, v)
    values += local_image_head * (STRIPS * ROWS * KEY_COLS * VALUES)
    store_pixels(values, slot * VALUES, exists, v, VALUES, VALUES)
