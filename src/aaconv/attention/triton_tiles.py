"""How each kernel is cut into tiles: the fastest of sweeps on an H200."""

from typing import NamedTuple

FEW_CHANNELS, MOST_CHANNELS = 48, 112
"""Of a key with its value, padded, that the largest tiles have registers for, and the smaller ones: heads of 20 with
values of 8, and of 32 with values of 32."""
SMALL_TABLE = 2048
"""Numbers of the tables' gradient that one warp, or two with 128 registers a thread, have room for: up to 16 x 16."""


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, and triton's launch options. With fewer registers a thread more
    programs run beside each other: each hides the latency of the others, until what is left over goes to memory.

    At most 2 warps: with 4, triton 3.6 and later turn the products into Hopper's wgmma, which then reads beyond the
    shared memory of operands as small as these (illegal memory access, found by compute-sanitizer).
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


class Traits(NamedTuple):
    """What tiles are chosen by. In half precision they were the fastest of sweeps on an H200, of maps from 7 x 7 to
    64 x 64."""

    pixels: int
    channels: int
    """Of a key with its value, padded."""
    itemsize: int
    table: int
    """Numbers of the tables' gradient that a program of `relative_backward` holds in registers."""
    line: int
    """The power of two that a row and a column of the map fit into."""
    mates: int
    """Heads that `pack` may take together."""


def pack_tile(of: Traits) -> Tile:
    if of.itemsize == 4:
        return Tile(16, 0, 1 if of.channels <= FEW_CHANNELS else 2, 1)
    if of.line <= 16 and of.channels <= MOST_CHANNELS:
        queries = max(16, min(64, of.line * of.mates))
        return Tile(queries, 0, 2 if queries == 64 else 1, 1)
    if 256 < of.pixels <= 1024:
        lines_of_two_heads = of.line == 32 and of.mates > 1 and of.channels <= FEW_CHANNELS
        return Tile(64 if lines_of_two_heads else 32, 0, 1, 1)
    return Tile(32, 0, 2, 1) if 2048 < of.pixels <= 4096 else Tile(16, 0, 1, 1)


def forward_tile(of: Traits) -> Tile:
    if of.itemsize == 4 or of.channels > MOST_CHANNELS:
        return Tile(16, 32, 2, 1)
    if of.channels > FEW_CHANNELS:
        return Tile(64, 32, 2, 3, 168)
    if of.pixels <= 128:
        return Tile(64, 64 if of.pixels < 64 else 32, 2, 3)
    if of.pixels <= 256:
        return Tile(128, 32, 2, 3, 168)
    if of.pixels <= 1024:
        return Tile(128, 64, 2, 4)
    return Tile(64, 64, 2, 3, 128) if of.pixels < 2048 else Tile(128, 64, 2, 3)


def query_tile(of: Traits) -> Tile:
    if of.itemsize == 4 or of.channels > MOST_CHANNELS:
        return Tile(16, 32, 2, 1)
    if of.channels > FEW_CHANNELS:
        return Tile(32, 32, 1, 3)
    if of.pixels <= 200:
        return Tile(64, 32, 2, 3, 128 if of.pixels < 64 else 168)
    return Tile(64, 64, 2, 3)


def key_tile(of: Traits) -> Tile:
    if of.itemsize == 4 or of.channels > MOST_CHANNELS:
        return Tile(16, 32, 2, 1)
    if of.channels > FEW_CHANNELS:
        return Tile(32, 64, 2, 3)
    if of.pixels <= 64:
        return Tile(32, 64, 1, 3) if of.pixels == 64 else Tile(32, 64, 2, 3, 128)
    return Tile(16, 128, 2, 3, 168) if of.pixels <= 256 else Tile(32, 128, 2, 3)


def relative_tile(of: Traits) -> Tile:
    if of.table > 2 * SMALL_TABLE:
        return Tile(16, 0, 2, 1)  # at 40 x 40 32 queries were faster with triton 3.6, but 3.9 has no registers for them
    if of.pixels <= 64 and of.channels <= MOST_CHANNELS and of.table <= SMALL_TABLE:
        return Tile(64, 0, 1, 1)
    if of.itemsize == 4:
        return Tile(16, 0, 2, 1)
    if of.table <= SMALL_TABLE and of.channels <= FEW_CHANNELS:
        return Tile(32, 0, 2, 1, 128) if of.pixels <= 200 else Tile(32, 0, 1, 1)
    return Tile(64 if 512 < of.pixels <= 1024 and of.channels <= FEW_CHANNELS else 32, 0, 2, 1)


def small_forward_tile(of: Traits) -> Tile:
    """A tile of keys has as many as one of queries at most: else triton would share the keys among the warps."""
    return Tile(64, 32, 2, 1) if of.pixels > 200 else Tile(32, 32, 2, 1)


def small_backward_tile(of: Traits) -> Tile:
    return Tile(32, 32, 2, 2 if of.pixels > 200 else 1)


TILES = {
    "pack": pack_tile,
    "attend_forward": forward_tile,
    "attend_backward_queries": query_tile,
    "attend_backward_keys": key_tile,
    "relative_backward": relative_tile,
    "attend_small_forward": small_forward_tile,
    "attend_small_backward": small_backward_tile,
}
