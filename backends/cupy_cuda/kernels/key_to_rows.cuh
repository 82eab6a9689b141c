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

// All of these are below 2^31, and 64-bit divisions are slow.

// The tile of entry e of the pair bg; -1 where the range does not reach that far, or the row may not see it.
DEVICE int tile_of(const Problem &p, const Turned &t, u32 bg, u32 e) {
    const u32 G = p.G, n = p.n, reach = t.reach, width = t.width, b = bg / G, g = bg % G, pair = e / reach, s = pair / n;
    int start, end;
    clamped_range(p, ((b * p.S + s) * p.G + g) * p.n + pair % n, row_limit(p, b, s), start, end);
    const u32 tile = static_cast<u32>(start) / width + e % reach;
    return end > start && tile * t.width < end ? static_cast<int>(tile) : -1;
}

// The list of piece number `index`, of pieces [lists + 1] before each list: the last list whose pieces begin at or before it.
DEVICE i64 list_of(const i64 *pieces, i64 lists, i64 index) {
    i64 list = 0;
    for (i64 beyond = lists; beyond - list > 1;) {
        i64 middle = (list + beyond) / 2;
        (pieces[middle] <= index ? list : beyond) = middle;
    }
    return list;
}

// Where a stretch's entries of a list are counted: lists in order, in each the stretches.
DEVICE i64 share_of(const Turned &t, u32 bg, u32 tile, u32 stretch) { return (bg * t.tiles + tile) * t.stretches + stretch; }
