// A segment of a unit's list (unit_lists.cuh) in steps of 64 rows (row_steps.cuh): what block_partials.cu and block_gradients.cu share.
#pragma once
#include "row_steps.cuh"
#include "unit_lists.cuh"

// A CTA's work: the entries of a segment. A warp finds it, in shared memory.
struct UnitSegment {
    const int *listed;            // its entries, or a copy of them
    i64 list;
    i64 first_entry;              // where entry 0 of (b, g) is among [pairs, section, n * reach], those of all entries of the unit
    int entries, masked_entries;  // all, and those at the beginning whose rows may lie within the tile
    int each;                     // entries of a row
    int first_key, b, g;
    int part;  // its number among the segments of the unit

    // Whether the unit has a segment number `index`, in the order of the lists or that of order_segments.cu.
    DEVICE bool find(const UnitLists &lists, const Problem &p, const int *all_entries, i64 reach, u32 index, const uint2 *order = nullptr) {
        const i64 segment = lists.segments[lists.first_list] + index;
        entries = 0;
        if (segment >= lists.segments[lists.end_list]) return false;
        list = order ? order[segment].x : lists.list_of(segment);
        const i64 number = order ? order[segment].y : segment - lists.segments[list];
        part = static_cast<int>(lists.segments[list] - lists.segments[lists.first_list] + number);
        const UnitList unit(lists, list);
        const i64 begin = lists.begins[list] + number * lists.segment;
        listed = all_entries + begin;
        entries = static_cast<int>(min(lists.begins[list + 1] - begin, lists.segment));
        masked_entries = p.q_pos ? entries : static_cast<int>(lists.begins[list] + KEYS - begin);
        each = static_cast<int>(p.n * reach);
        first_key = static_cast<int>(unit.tile) * KEYS;
        b = static_cast<int>(unit.pair / p.G);
        g = static_cast<int>(unit.pair % p.G);
        first_entry = ((unit.pair - lists.first_pair) * lists.section - lists.first_row) * each;
        return true;
    }
};

// The steps of a segment. Its numbers stay in shared memory: the producers have few registers.
template <class Arguments, class Segment = UnitSegment>
struct UnitSteps {
    const Arguments &x;
    const Segment &segment;
    const int first_key, steps;
    const i64 b, g;
    DEVICE UnitSteps(const Arguments &arguments, const Segment &segment)
        : x(arguments), segment(segment), first_key(segment.first_key), steps((segment.entries + TQ - 1) / TQ), b(segment.b), g(segment.g) {}
    DEVICE int row_of(int entry) const { return static_cast<int>(static_cast<u32>(segment.listed[entry]) / static_cast<u32>(segment.each)); }
    DEVICE int row(int step, int i) const {
        const int entry = step * TQ + i;
        return i < TQ && entry < segment.entries ? row_of(entry) : static_cast<int>(x.p.S);
    }
    // The number in the segment of the entry that tile row i of a step belongs to; negative if there is none.
    DEVICE int number(int step, int i) const {
        const int at = step * TQ + i / H;
        return i < TQ * H && at < segment.entries ? at : -1;
    }
    // That entry.
    DEVICE int entry(int step, int i) const {
        const int at = number(step, i);
        return at < 0 ? -1 : segment.listed[at];
    }
};

// One past the last key of the tile that any row of the segment sees; for all threads of the consumers.
template <int THREADS, class Steps>
DEVICE int seen_keys(const Steps &list) {
    __shared__ int limits[THREADS / 32];
    const Problem &p = list.x.p;
    int limit = 0;
    for (int entry = p.q_pos ? threadIdx.x : list.segment.entries - 1; entry < list.segment.entries; entry += THREADS)  // by default the last's
        limit = max(limit, row_limit(p, list.b, list.row_of(entry)) - list.first_key);
    for (int far = 16; far > 0; far /= 2) limit = max(limit, __shfl_xor_sync(ALL_LANES, limit, far));
    if (threadIdx.x % 32 == 0) limits[threadIdx.x / 32] = limit;
    named_barrier<THREADS>(1);
    int most = limits[0];
    UNROLL for (int warp = 1; warp < THREADS / 32; ++warp) most = max(most, limits[warp]);
    return most;
}
