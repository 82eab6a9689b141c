// Entries of a row, shared by shared_tiles.cu and join_partials.cu: entry range * reach + step is the step-th tile of
// 64 keys of a range.
#pragma once
#include "softmax.cuh"

constexpr int KEYS = 64, TQ = 64 / H;  // keys per tile; adjacent tokens that may share a tile, with H heads each

// Return the tile of an entry of row `row` (index in [B,S,G]), -1 if the range ends before it. limit: the row's
// `row_limit`.
DEVICE int tile_of(const Problem &p, int reach, i64 row, int limit, int entry) {
    int start, end;
    clamped_range(p, row * p.n + entry / reach, limit, start, end);
    const int tile = start / KEYS + entry % reach;
    return end > start && tile * KEYS < end ? tile : -1;
}
