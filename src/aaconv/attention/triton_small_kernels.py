"""Fused 2-D relative attention on small maps, up to 16 x 16: nothing is packed, a program has all keys of its head.

On such a map one warp has room for all keys and values of a head in its registers, laid out for the matrix units. So a
program lays them out once, and lets tiles of queries pass by. Keys stand in strips of LINE slots, a strip for each row
of the map, and what a logit is made of is as in triton_pack:

    key slot   [MAIN + 16]   k | 0 ... | one-hot of row % GROUP, from ROWS_AT on after MAIN
    query      [MAIN + 16]   q | 0 ... | relative logits of the GROUP's rows, OUTSIDE for rows beyond the map

and the columns' logits are what the product accumulates onto, OUTSIDE for slots beyond the map. Relative logits are a
product with all vectors of a table, skewed by a gather.
"""

import triton
import triton.language as tl

from .triton_pack import find_head, load_pixels, store_pixels


@triton.jit
def load_vectors(table, side: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """[32, D_PAD]: the 2 side - 1 vectors of a table, and zeros."""
    offset = tl.arange(0, 32)
    return load_pixels(table, offset * D, offset < 2 * side - 1, D, D_PAD)


@triton.jit
def skew(by_offset, i, j, side: tl.constexpr):
    """[queries, places]: of the logits by relative offset [queries, 32] those of places j of a query at i."""
    return tl.gather(by_offset, (j[None, :] - i[:, None] + (side - 1)) & 31, 1)


@triton.jit
def load_small_keys(
    qkv, image, head, chunk: tl.constexpr,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, MAIN: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr,
    LINE: tl.constexpr, DV_PAD: tl.constexpr, KEY_SCALE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """[KEYS, MAIN] and [KEYS, 16] of the keys of a chunk of slots, and [KEYS, DV_PAD] of their values, with ones."""
    dtype = qkv.dtype.element_ty
    slot = chunk * KEYS + tl.arange(0, KEYS)
    jy, jx = slot // LINE, slot % LINE
    on_map = (jy < H) & (jx < W)
    place = tl.multiple_of((jy * W + jx) * STRIDE_P, STRIDE_P & -STRIDE_P)  # as in `pack`
    base = qkv + image * STRIDE_B + (HEADS + head) * D
    main = (load_pixels(base, place, on_map, D if D < MAIN else MAIN, MAIN).to(tl.float32) * KEY_SCALE).to(dtype)
    depth = tl.arange(0, 16)[None, :]
    tail = tl.where(depth - ROWS_AT == (jy % GROUP)[:, None], 1.0, 0.0)
    if D > MAIN:
        tail += load_pixels(base + MAIN, place, on_map, D - MAIN, 16).to(tl.float32) * KEY_SCALE
    v = load_pixels(qkv + image * STRIDE_B + 2 * HEADS * D + head * DV, place, on_map, DV, DV_PAD)
    v = tl.where((tl.arange(0, DV_PAD) == DV)[None, :], 1.0, v).to(dtype)
    return main, tail.to(dtype), v


@triton.jit
def attend_tile(
    q_base, pixel, vectors_h, vectors_w, keys, key_tails, values, out, lse,
    STRIDE_P: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, MAIN: tl.constexpr, ROWS_AT: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr,
    DV_PAD: tl.constexpr, OUTSIDE: tl.constexpr, KEY_SCALE: tl.constexpr, TAKE_OFF: tl.constexpr,
    BLOCK_M: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a tile of queries; returns the sums of their weights [BLOCK_M]. With TAKE_OFF the
    largest logit is taken off all, which is always safe and computes the logits twice."""
    PIXELS: tl.constexpr = H * W
    CHUNKS: tl.constexpr = (H * LINE + KEYS - 1) // KEYS
    depth = tl.arange(0, 16)
    column = tl.arange(0, LINE)
    inside = pixel < PIXELS
    whole_q = load_pixels(q_base, pixel * STRIDE_P, inside, D, D_PAD)
    q = load_pixels(q_base, pixel * STRIDE_P, inside, MAIN, MAIN) if MAIN < D_PAD else whole_q
    by_offset = tl.dot(whole_q, tl.trans(vectors_w)) * KEY_SCALE
    columns = tl.where((column < W)[None, :], skew(by_offset, pixel % W, column, W), OUTSIDE)
    columns = tl.broadcast_to(columns[:, None, :], [BLOCK_M, KEYS // LINE, LINE])
    columns = tl.reshape(columns, [BLOCK_M, KEYS])
    by_offset = tl.dot(whole_q, tl.trans(vectors_h)) * KEY_SCALE
    tails = ()
    for group in tl.static_range((H + GROUP - 1) // GROUP):
        row = group * GROUP + depth - ROWS_AT
        tail = tl.where((row < H)[None, :], skew(by_offset, pixel // W, row, H), OUTSIDE)
        if ROWS_AT > 0:
            rest = load_pixels(q_base + MAIN, pixel * STRIDE_P, inside, D - MAIN, 16)
            tail = tl.where((depth < ROWS_AT)[None, :], rest.to(tl.float32), tail)
        tails = tails + (tail.to(q.dtype),)  # noqa: RUF005  triton's tuples

    peak = tl.zeros([BLOCK_M], tl.float32)
    if TAKE_OFF:
        peak += float("-inf")
        for chunk in tl.static_range(CHUNKS):
            s = tl.dot(q, tl.trans(keys[chunk]), columns)
            s = tl.dot(tails[chunk * KEYS // LINE // GROUP], tl.trans(key_tails[chunk]), s)
            peak = tl.maximum(peak, tl.max(s, 1))
        columns -= peak[:, None]
    mixed = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        s = tl.dot(q, tl.trans(keys[chunk]), columns)
        s = tl.dot(tails[chunk * KEYS // LINE // GROUP], tl.trans(key_tails[chunk]), s)
        mixed = tl.dot(tl.exp2(s).to(q.dtype), values[chunk], mixed)
    total = tl.sum(tl.where((tl.arange(0, DV_PAD) == DV)[None, :], mixed, 0.0), 1)
    store_pixels(out, pixel * (HEADS * DV), inside, mixed / total[:, None], DV, DV_PAD)
    tl.store(lse + pixel, peak, mask=inside)
    tl.store(lse + PIXELS + pixel, tl.log2(total), mask=inside)
    return total


@triton.jit(do_not_specialize=["first_image_head"])
def attend_small_forward(
    qkv, rel_h, rel_w, out, lse, first_image_head,
    STRIDE_B: tl.constexpr, STRIDE_P: tl.constexpr,
    HEADS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    SMALL_MAIN: tl.constexpr, SMALL_ROWS_AT: tl.constexpr, SMALL_GROUP: tl.constexpr, LINE: tl.constexpr,
    SMALL_VALUES: tl.constexpr, OUTSIDE: tl.constexpr, KEY_SCALE: tl.constexpr, TAKE_OFF: tl.constexpr,
    SMALLEST_SUM: tl.constexpr, LARGEST_SUM: tl.constexpr, BLOCK_M: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One program an (image, head, part of the query tiles). lse as in `attend_forward`. bfloat16 takes nothing off the
    logits; if any sum of the weights comes out too large or too small, the program does all its tiles again and takes
    off the largest. float16, which has less range, does so at once: TAKE_OFF."""
    PIXELS: tl.constexpr = H * W
    TILES: tl.constexpr = (PIXELS + BLOCK_M - 1) // BLOCK_M
    dtype = qkv.dtype.element_ty
    _, image_head, image, head = find_head(tl.program_id(0) // PARTS, first_image_head, HEADS)
    first = tl.program_id(0) % PARTS
    keys, key_tails, values = (), (), ()
    for chunk in tl.static_range((H * LINE + KEYS - 1) // KEYS):
        k, k_tail, v = load_small_keys(
            qkv, image, head, chunk, STRIDE_B, STRIDE_P, HEADS, H, W, D, DV, SMALL_MAIN, SMALL_ROWS_AT, SMALL_GROUP,
            LINE, SMALL_VALUES, KEY_SCALE, KEYS,
        )  # fmt: skip
        keys, key_tails, values = keys + (k,), key_tails + (k_tail,), values + (v,)  # noqa: RUF005  triton's tuples
    vectors_h = load_vectors(rel_h, H, D, D_PAD).to(dtype)
    vectors_w = load_vectors(rel_w, W, D, D_PAD).to(dtype)

    q_base = qkv + image * STRIDE_B + head * D
    out += image * (PIXELS * HEADS * DV) + head * DV
    lse += image_head * (2 * PIXELS)
    worst = 1
    for tile in range(first, TILES, PARTS):
        total = attend_tile(
            q_base, tile * BLOCK_M + tl.arange(0, BLOCK_M), vectors_h, vectors_w, keys, key_tails, values, out, lse,
            STRIDE_P, HEADS, H, W, D, DV, D_PAD, SMALL_MAIN, SMALL_ROWS_AT, SMALL_GROUP, LINE, SMALL_VALUES, OUTSIDE,
            KEY_SCALE, TAKE_OFF, BLOCK_M, KEYS,
        )  # fmt: skip
        if not TAKE_OFF:
            well = (total > SMALLEST_SUM) & (total < LARGEST_SUM)  # not if it is not a number
            worst = tl.minimum(worst, tl.min(well.to(tl.int32), 0))
    if not TAKE_OFF:
        tl.debug_barrier()  # what is stored again may be stored by other threads
        for tile in range(first, tl.where(worst == 0, TILES, 0), PARTS):
            attend_tile(
                q_base, tile * BLOCK_M + tl.arange(0, BLOCK_M), vectors_h, vectors_w, keys, key_tails, values, out, lse,
                STRIDE_P, HEADS, H, W, D, DV, D_PAD, SMALL_MAIN, SMALL_ROWS_AT, SMALL_GROUP, LINE, SMALL_VALUES,
                OUTSIDE, KEY_SCALE, True, BLOCK_M, KEYS,
            )  # fmt: skip
