// Entries of a row, as shared_tiles.cu and join_partials.cu number them: entry range * reach + step is the step-th tile of 64 keys of a range.
#pragma once
#include "softmax.cuh"

constexpr int KEYS = 64, TQ = 64 / H;  // keys of a tile; adjacent tokens that may share it, with H heads each

// The tile that an entry of row `row` among B*S*G reaches, -1 if the range ends before it. limit: of the row.
DEVICE int tile_of(const Problem &p, int reach, i64 row, int limit, int entry) {
    int start, end;
    clamped_range(p, row * p.n + entry / reach, limit, start, end);
    const int tile = start / KEYS + entry % reach;
    return end > start && tile * KEYS < end ? tile : -1;
}
