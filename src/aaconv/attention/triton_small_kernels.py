"""Fused 2-D relative attention on small maps, up to 16 x 16: nothing is packed, a program has all keys of its head.

A program lays out the keys of its head once, in shared memory, and lets tiles of queries pass by. Both stand in strips
of LINE slots, a strip for each row of the map, and what a logit is made of is as in triton_pack:

    key     [slot, DEPTH]   k | 0 ... | from ROWS_AT on: one-hot of row % GROUP
    query   [slot, DEPTH]   q | 0 ... | from ROWS_AT on: relative logits of a GROUP's rows, OUTSIDE beyond the map

and the columns' logits are what the product accumulates onto, OUTSIDE for slots beyond the map. Relative logits are a
product with all vectors of a table, skewed by a gather.
"""

import triton
import triton.language as tl

from .triton_pack import find_head, load_pixels, store_pixels

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_slots(first, SLOTS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, LINE: tl.constexpr):
    """Of so many slots from `first` on, where a row begins: their rows, columns, and which of them are on the map."""
    slot = tl.arange(0, SLOTS)
    y, x = first // LINE + slot // LINE, slot % LINE
    return y, x, (y < H) & (x < W)


@triton.jit
def load_vectors(table, side: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr):
    """[32, DEPTH]: the 2 side - 1 vectors of a table, and zeros."""
    offset = tl.arange(0, 32)
    return load_pixels(table, offset * D, offset < 2 * side - 1, D, DEPTH)


@triton.jit
def load_keys(
    qkv, image, head, chunk: tl.constexpr,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, DEPTH: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    LINE: tl.constexpr, VALUES: tl.constexpr, ONES: tl.constexpr, KEY_SCALE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[KEYS, DEPTH] of the keys of a chunk of slots, and [KEYS, VALUES] of their values, so many ones after them."""
    jy, jx, on_map = find_slots(chunk * KEYS, KEYS, H, W, LINE)
    place = tl.multiple_of((jy * W + jx) * STRIDE_P, STRIDE_P & -STRIDE_P)  # as in `pack`
    k = load_pixels(qkv + image * STRIDE_B + (HEADS + head) * D, place, on_map, D, DEPTH).to(tl.float32) * KEY_SCALE
    k = tl.where(tl.arange(0, DEPTH)[None, :] - ROWS_AT == (jy % GROUP)[:, None], 1.0, k)
    v = load_pixels(qkv + image * STRIDE_B + 2 * HEADS * D + head * DV, place, on_map, DV, VALUES)
    channel = tl.arange(0, VALUES)
    v = tl.where(((channel >= DV) & (channel < DV + ONES))[None, :], 1.0, v)
    return k.to(qkv.dtype.element_ty), v.to(qkv.dtype.element_ty)


@triton.jit
def skew(by_offset, i, j, side: tl.constexpr):
    """[queries, places]: of the logits by relative offset [queries, 32] those of places j for queries at i."""
    return tl.gather(by_offset, (j[None, :] - i[:, None] + (side - 1)) & 31, 1)


@triton.jit
def relative_logits(
    q, iy, ix, vectors_h, vectors_w, H: tl.constexpr, W: tl.constexpr, DEPTH: tl.constexpr, ROWS_AT: tl.constexpr,
    GROUP: tl.constexpr, LINE: tl.constexpr, OUTSIDE: tl.constexpr, KEY_SCALE: tl.constexpr,
):  # fmt: skip
    """Of queries [slots, DEPTH]: the same with the logits of a group's rows beside them, for every group, and the
    columns' logits [slots, LINE]."""
    column = tl.arange(0, LINE)
    depth = tl.arange(0, DEPTH)
    by_offset = tl.dot(q, tl.trans(vectors_w)) * KEY_SCALE
    by_offset = by_offset.to(q.dtype).to(tl.float32)  # as `pack` rounds them, whose backward takes our log-sum-exp
    columns = tl.where((column < W)[None, :], skew(by_offset, ix, column, W), OUTSIDE)
    by_offset = tl.dot(q, tl.trans(vectors_h)) * KEY_SCALE
    queries = ()
    for group in tl.static_range((H + GROUP - 1) // GROUP):
        row = group * GROUP + depth - ROWS_AT
        rows = tl.where((row < H)[None, :], skew(by_offset, iy, row, H), OUTSIDE)
        beside = tl.where((depth < ROWS_AT)[None, :], q, rows.to(q.dtype))
        queries = queries + (tl.where((depth < ROWS_AT + GROUP)[None, :], beside, 0.0).to(q.dtype),)  # noqa: RUF005
    return queries, columns


@triton.jit
def attend_tile(
    q_base, first, vectors_h, vectors_w, keys, values, out, lse,
    STRIDE_P: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    DEPTH: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr, VALUES: tl.constexpr,
    OUTSIDE: tl.constexpr, KEY_SCALE: tl.constexpr, TAKE_OFF: tl.constexpr, BLOCK_M: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the queries from slot `first` on; returns the sums of their weights [BLOCK_M]. With
    TAKE_OFF the largest logit is taken off all, which is always safe and computes the logits twice."""
    PIXELS: tl.constexpr = H * W
    CHUNKS: tl.constexpr = (H * LINE + KEYS - 1) // KEYS
    iy, ix, inside = find_slots(first, BLOCK_M, H, W, LINE)
    pixel = iy * W + ix
    q = load_pixels(q_base, pixel * STRIDE_P, inside, D, DEPTH)
    queries, columns = relative_logits(
        q, iy, ix, vectors_h, vectors_w, H, W, DEPTH, ROWS_AT, GROUP, LINE, OUTSIDE, KEY_SCALE
    )
    columns = tl.broadcast_to(columns[:, None, :], [BLOCK_M, KEYS // LINE, LINE])
    columns = tl.reshape(columns, [BLOCK_M, KEYS])
    peak = tl.zeros([BLOCK_M], tl.float32)
    if TAKE_OFF:
        peak += float("-inf")
        for chunk in tl.static_range(CHUNKS):
            s = tl.dot(queries[chunk * KEYS // LINE // GROUP], tl.trans(keys[chunk]), columns)
            peak = tl.maximum(peak, tl.max(s, 1))
        columns -= peak[:, None]
    mixed = tl.zeros([BLOCK_M, VALUES], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        s = tl.dot(queries[chunk * KEYS // LINE // GROUP], tl.trans(keys[chunk]), columns)
        mixed = tl.dot(tl.exp2(s).to(q.dtype), values[chunk], mixed)
    total = tl.sum(tl.where((tl.arange(0, VALUES) == DV)[None, :], mixed, 0.0), 1)
    store_pixels(out, pixel * (HEADS * DV), inside, mixed * (1.0 / total)[:, None], DV, VALUES)
    tl.store(lse + pixel, peak, mask=inside)
    tl.store(lse + PIXELS + pixel, tl.log2(total), mask=inside)
    return total


@triton.jit(do_not_specialize=["first_image_head"])
def attend_small_forward(
    qkv, rel_h, rel_w, out, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DEPTH: tl.constexpr,
    ROWS_AT: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr, DV_PAD: tl.constexpr, OUTSIDE: tl.constexpr,
    KEY_SCALE: tl.constexpr, TAKE_OFF: tl.constexpr, SMALLEST_SUM: tl.constexpr, LARGEST_SUM: tl.constexpr,
    BLOCK_M: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program an (image, head, part of the query tiles). lse as in `attend_forward`. bfloat16 takes nothing off the
    logits; if any sum of the weights comes out too large or too small, the program does all its tiles again and takes
    off the largest. float16, which has less range, does so at once: TAKE_OFF."""
    PIXELS: tl.constexpr = H * W
    TILES: tl.constexpr = (H * LINE + BLOCK_M - 1) // BLOCK_M
    dtype = qkv.dtype.element_ty
    _, image_head, image, head = find_head(tl.program_id(0) // PARTS, first_image_head, HEADS)
    first = tl.program_id(0) % PARTS
    keys, values = (), ()
    for chunk in tl.static_range((H * LINE + KEYS - 1) // KEYS):
        k, v = load_keys(
            qkv, image, head, chunk, STRIDE_B, STRIDE_P, HEADS, H, W, D, DV, DEPTH, ROWS_AT, GROUP, LINE, DV_PAD, 1,
            KEY_SCALE, KEYS,
        )  # fmt: skip
        keys, values = keys + (k,), values + (v,)  # noqa: RUF005  triton's tuples
    vectors_h = load_vectors(rel_h, H, D, DEPTH).to(dtype)
    vectors_w = load_vectors(rel_w, W, D, DEPTH).to(dtype)

    q_base = qkv + image * STRIDE_B + head * D
    out += image * (PIXELS * HEADS * DV) + head * DV
    lse += image_head * (2 * PIXELS)
    worst = 1
    for tile in range(first, TILES, PARTS):
        total = attend_tile(
            q_base, tile * BLOCK_M, vectors_h, vectors_w, keys, values, out, lse, STRIDE_P,
            HEADS, H, W, D, DV, DEPTH, ROWS_AT, GROUP, LINE, DV_PAD, OUTSIDE, KEY_SCALE, TAKE_OFF, BLOCK_M, KEYS,
        )  # fmt: skip
        if not TAKE_OFF:
            well = (total > SMALLEST_SUM) & (total < LARGEST_SUM)  # not if it is not a number
            worst = tl.minimum(worst, tl.min(well.to(tl.int32), 0))
    if worst == 0:
        tl.debug_barrier()  # what is stored again may be stored by other threads
        for tile in range(first, TILES, PARTS):
            attend_tile(
                q_base, tile * BLOCK_M, vectors_h, vectors_w, keys, values, out, lse, STRIDE_P, HEADS, H, W, D, DV,
                DEPTH, ROWS_AT, GROUP, LINE, DV_PAD, OUTSIDE, KEY_SCALE, True, BLOCK_M, KEYS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first_image_head"])
def attend_small_backward(
    qkv, rel_h, rel_w, out, lse, grad_out, grad_qkv, grad_tables, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DEPTH: tl.constexpr,
    ROWS_AT: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr, DV_PAD: tl.constexpr, OUTSIDE: tl.constexpr,
    KEY_SCALE: tl.constexpr, LOGIT_SCALE: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """All gradients of an (image, head), those of the tables in its slice of grad_tables [image_heads, 2H + 2W - 2, D].
    Logits are [slots, queries] here, so that their gradients go into those of the keys as they are: these stay in
    registers, MAIN channels and the REST, and the queries' are done after every tile. Each weight is computed once."""
    PIXELS: tl.constexpr = H * W
    CHUNKS: tl.constexpr = (H * LINE + KEYS - 1) // KEYS
    ROWS: tl.constexpr = KEYS // LINE  # of a chunk
    GRAD_W: tl.constexpr = HEADS * (2 * D + DV)
    dtype = qkv.dtype.element_ty
    _, image_head, image, head = find_head(tl.program_id(0), first_image_head, HEADS)
    keys, values, main_grads, rest_grads, value_grads = (), (), (), (), ()
    for chunk in tl.static_range(CHUNKS):
        k, v = load_keys(
            qkv, image, head, chunk, STRIDE_B, STRIDE_P, HEADS, H, W, D, DV, DEPTH, ROWS_AT, GROUP, LINE, 16, 2,
            KEY_SCALE, KEYS,
        )  # fmt: skip
        keys, values = keys + (k,), values + (v,)  # noqa: RUF005  triton's tuples
        main_grads = main_grads + (tl.zeros([KEYS, MAIN], tl.float32),)  # noqa: RUF005
        rest_grads = rest_grads + (tl.zeros([KEYS, 8], tl.float32),)  # noqa: RUF005
        value_grads = value_grads + (tl.zeros([KEYS, DV_PAD], tl.float32),)  # noqa: RUF005
    vectors_h = load_vectors(rel_h, H, D, DEPTH).to(dtype)
    vectors_w = load_vectors(rel_w, W, D, DEPTH).to(dtype)
    grad_h = tl.zeros([32, MAIN], tl.float32)
    grad_w = tl.zeros([32, MAIN], tl.float32)
    rest_h = tl.zeros([32, 8], tl.float32)
    rest_w = tl.zeros([32, 8], tl.float32)

    q_base = qkv + image * STRIDE_B + head * D
    out_base = image * (PIXELS * HEADS * DV) + head * DV
    grad_base = grad_qkv + image * (PIXELS * GRAD_W)
    lse += image_head * (2 * PIXELS)
    depth = tl.arange(0, DEPTH)[None, :]
    channel = tl.arange(0, 16)[None, :]
    offset = tl.arange(0, 32)[None, :]
    of_column = tl.where((tl.arange(0, KEYS) % LINE)[:, None] == channel, 1.0, 0.0).to(dtype)  # sums over the rows
    for first in range(0, H * LINE, BLOCK_M):
        iy, ix, inside = find_slots(first, BLOCK_M, H, W, LINE)
        pixel = iy * W + ix
        q = load_pixels(q_base, pixel * STRIDE_P, inside, D, DEPTH)
        q_main = load_pixels(q_base, pixel * STRIDE_P, inside, D if D < MAIN else MAIN, MAIN)
        if REST > 0:
            q_rest = load_pixels(q_base + MAIN, pixel * STRIDE_P, inside, D - MAIN, 8)
        do = load_pixels(grad_out + out_base, pixel * (HEADS * DV), inside, DV, 16)
        o = load_pixels(out + out_base, pixel * (HEADS * DV), inside, DV, DV_PAD)
        do_part = load_pixels(grad_out + out_base, pixel * (HEADS * DV), inside, DV, DV_PAD)
        log_sum = tl.load(lse + pixel, mask=inside, other=0.0) + tl.load(lse + PIXELS + pixel, mask=inside, other=0.0)
        delta = tl.sum(do_part.to(tl.float32) * o.to(tl.float32), 1)[:, None]
        rounded = delta.to(dtype)
        rest = (rounded.to(tl.float32) - delta).to(dtype)
        do = tl.where(channel == DV, -rounded, tl.where(channel == DV + 1, rest, do))
        queries, columns = relative_logits(
            q, iy, ix, vectors_h, vectors_w, H, W, DEPTH, ROWS_AT, GROUP, LINE, OUTSIDE, KEY_SCALE
        )
        columns = tl.trans(columns)
        columns = tl.reshape(tl.broadcast_to(columns[None, :, :], [ROWS, LINE, BLOCK_M]), [KEYS, BLOCK_M])
        columns -= log_sum[None, :]
        columns_grad = tl.zeros([BLOCK_M, 16], tl.float32)
        query_grad = tl.zeros([BLOCK_M, DEPTH], tl.float32)
        by_row = tl.zeros([BLOCK_M, 32], tl.float32)
        jy = offset + (iy - (H - 1))[:, None]
        new_main, new_rest, new_values = (), (), ()
        for chunk in tl.static_range(CHUNKS):
            first_row = chunk * ROWS // GROUP * GROUP  # of the group
            p = tl.exp2(tl.dot(keys[chunk], tl.trans(queries[chunk * ROWS // GROUP]), columns))
            ds = (p * tl.dot(values[chunk], tl.trans(do))).to(dtype)
            new_values = new_values + (tl.dot(p.to(dtype), do_part, value_grads[chunk]),)  # noqa: RUF005
            new_main = new_main + (tl.dot(ds, q_main, main_grads[chunk]),)  # noqa: RUF005
            if REST > 0:
                new_rest = new_rest + (tl.dot(ds, q_rest, rest_grads[chunk]),)  # noqa: RUF005
            query_grad = tl.dot(tl.trans(ds), keys[chunk], query_grad)
            columns_grad = tl.dot(tl.trans(ds), of_column, columns_grad)
            if (chunk + 1) * ROWS % GROUP == 0 or chunk + 1 == CHUNKS:  # the last rows of their group
                of_rows = tl.gather(query_grad, (ROWS_AT + (jy & (GROUP - 1))) & (DEPTH - 1), 1)
                by_row = tl.where((jy >= first_row) & (jy < first_row + GROUP), of_rows, by_row)
                query_grad = tl.where(depth < ROWS_AT, query_grad, 0.0)
        main_grads, value_grads = new_main, new_values
        if REST > 0:
            rest_grads = new_rest
        # the skew undone: by row and column -> by relative offset
        by_row = tl.where((jy >= 0) & (jy < H), by_row, 0.0).to(dtype)
        jx = offset + (ix - (W - 1))[:, None]
        by_column = tl.gather(columns_grad, jx & 15, 1)
        by_column = tl.where((jx >= 0) & (jx < W), by_column, 0.0).to(dtype)
        relative = tl.dot(by_column, vectors_w, tl.dot(by_row, vectors_h))
        query_grad = query_grad * LN2 + relative * LOGIT_SCALE
        store_pixels(grad_base + head * D, pixel * GRAD_W, inside, query_grad, D, DEPTH)
        grad_h = tl.dot(tl.trans(by_row), q_main, grad_h)
        grad_w = tl.dot(tl.trans(by_column), q_main, grad_w)
        if REST > 0:
            rest_h = tl.dot(tl.trans(by_row), q_rest, rest_h)
            rest_w = tl.dot(tl.trans(by_column), q_rest, rest_w)

    for chunk in tl.static_range(CHUNKS):
        jy, jx, on_map = find_slots(chunk * KEYS, KEYS, H, W, LINE)
        place = tl.multiple_of((jy * W + jx) * GRAD_W, GRAD_W & -GRAD_W)
        key_base = grad_base + (HEADS + head) * D
        store_pixels(key_base, place, on_map, main_grads[chunk] * LOGIT_SCALE, D if D < MAIN else MAIN, MAIN)
        if REST > 0:
            store_pixels(key_base + MAIN, place, on_map, rest_grads[chunk] * LOGIT_SCALE, D - MAIN, 8)
        store_pixels(grad_base + 2 * HEADS * D + head * DV, place, on_map, value_grads[chunk], DV, DV_PAD)
    vector = tl.arange(0, 32)
    grad_tables += image_head * ((2 * H + 2 * W - 2) * D)
    grad_tables_w = grad_tables + (2 * H - 1) * D
    store_pixels(grad_tables, vector * D, vector < 2 * H - 1, grad_h * LOGIT_SCALE, D if D < MAIN else MAIN, MAIN)
    store_pixels(grad_tables_w, vector * D, vector < 2 * W - 1, grad_w * LOGIT_SCALE, D if D < MAIN else MAIN, MAIN)
    if REST > 0:
        store_pixels(grad_tables + MAIN, vector * D, vector < 2 * H - 1, rest_h * LOGIT_SCALE, D - MAIN, 8)
        store_pixels(grad_tables_w + MAIN, vector * D, vector < 2 * W - 1, rest_w * LOGIT_SCALE, D - MAIN, 8)
