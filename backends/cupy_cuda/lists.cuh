// The selection turned round, by a counting sort (lists.py): rank.cu numbers the entries of every list, place.cu puts them there.
//
// Entry e of the pair bg = b * G + g is (s * n + range) * reach + step: row s, and the step-th tile of `width` keys that the range meets.
// List number bg * tiles + tile holds the entries of that tile in ascending order. A thread block numbers a stretch of rows.
#pragma once
#include "common.cuh"

struct Turned {
    i64 each, reach, width, tiles;  // entries of a pair, tiles that a range may meet, keys of a tile, tiles of a pair
    i64 stretch, stretches;         // rows of a stretch, stretches of a pair
};

// The tile of entry e of the pair bg; -1 where the range does not reach that far, or the row may not see it.
DEVICE int tile_of(const Problem &p, const Turned &t, i64 bg, i64 e) {
    i64 b = bg / p.G, g = bg % p.G, s = e / (p.n * t.reach);
    int start, end;
    clamped_range(p, ((b * p.S + s) * p.G + g) * p.n + e / t.reach % p.n, row_limit(p, b, s), start, end);
    i64 tile = start / t.width + e % t.reach;
    return end > start && tile * t.width < end ? static_cast<int>(tile) : -1;
}

// Where a stretch's entries of a list are counted: lists in order, in each the stretches.
DEVICE i64 share_of(const Turned &t, i64 bg, i64 tile, i64 stretch) { return (bg * t.tiles + tile) * t.stretches + stretch; }
