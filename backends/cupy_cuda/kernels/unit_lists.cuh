// Row lists of a triton-block unit (_triton/units.py), split into segments, and the destinations of their gradients
// (cuda_block.py).
//
// Lists are ordered by section of rows, then pair (b, g), then tile of 64 keys. dk and dv of a pair accumulate over its
// sections, which are separate units: in float32, dk without its scale, until the last section.
#pragma once
#include "key_to_rows.cuh"

struct UnitLists {
    const i64 *begins;    // [lists + 1]: first entry of each list
    const i64 *segments;  // [lists + 1]: segments of the lists before
    i64 segment;          // most entries per segment
    i64 tiles, pairs_all, stretches, first_list, end_list, piece, first_pair, first_row, section;  // `UnitLists` of units.py

    // Return the list of a segment: the last list whose segments begin at or before it. A whole warp searches.
    DEVICE i64 list_of(i64 segment) const {
        i64 list = first_list;
        for (i64 span = end_list - first_list; span > 1;) {
            const i64 step = (span + 31) / 32, probe = list + threadIdx.x % 32 * step;
            const bool before = probe < list + span && segments[probe] <= segment;
            const i64 last = __popc(__ballot_sync(ALL_LANES, before)) - 1;  // the first lane always is
            list += last * step;
            span = min(step, span - last * step);
        }
        return list;
    }
};

struct UnitGradients {
    UnitLists lists;
    i64 adds, final;           // adds: this is not the first section of its pairs; final: it is the last one
    float *part_dk, *part_dv;  // [segments of the unit, 64, D]: partial sums of lists with several segments
    float *sum_dk, *sum_dv;    // [pairs, tiles, 64, D]; null if there is one section
    u16 *dk, *dv;              // [B*G, S_kv, D]
};

struct UnitList {
    i64 pair, tile;
    int segments;
    DEVICE UnitList(const UnitLists &lists, i64 list)
        : pair(list / lists.tiles % lists.pairs_all), tile(list % lists.tiles),
          segments(static_cast<int>(lists.segments[list + 1] - lists.segments[list])) {}
    // The row of the tile's first key in the sums.
    DEVICE i64 sum_row(const UnitLists &lists) const { return ((pair - lists.first_pair) * lists.tiles + tile) * 64; }
};

// Load a warp's 16 keys of the sums, from `row` on, as an accumulator of D columns; zeros if `adds` is false.
template <int D>
DEVICE void load_sums(float (&acc)[D / 2], const float *sums, i64 row, bool adds) {
    sums += row * D;
    UNROLL for (int i = 0; i < elements<float[D / 2]>; i += 2)
        UNROLL for (int r = 0; r < 2; ++r) {
            const int key = threadIdx.x % 32 / 4 + 8 * r;
            const float2 pair = adds ? *reinterpret_cast<const float2 *>(sums + key * D + column_of(i)) : make_float2(0.0f, 0.0f);
            element(acc, r, i) = pair.x;
            element(acc, r, i + 1) = pair.y;
        }
}
