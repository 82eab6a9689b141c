// The inverted selection: for every tile of keys, the list of rows that selected any of them (key_to_rows.py). Also:
// code that the dk/dv kernels share.
//
// Entry e of bg = b * G + g is (s * n + range) * reach + step: row s, and the step-th tile of `width` keys that the
// range touches. List bg * tiles + tile holds the entries of that tile in ascending order (sort.cuh). Long lists are
// split into segments, one CTA each. The tiles of a block share one list, because a row that sees one of them whole
// sees all before it: an entry is a (row, range), filed under the last tile that the row sees, and the list of a tile
// is the block's list from the tile's own entries on.
#pragma once
#include "softmax.cuh"


// SHARED_BY groups that share a selection share its lists: a CTA takes a segment for one of them. The grid has as many
// CTAs for each group, one group after the other.
DEVICE u32 group_of_cta() { return SHARED_BY == 1 ? 0 : blockIdx.x / (gridDim.x / SHARED_BY); }
DEVICE u32 cta_of_group() { return SHARED_BY == 1 ? blockIdx.x : blockIdx.x % (gridDim.x / SHARED_BY); }

struct KeyToRows {
    const int *entries;   // e, list after list
    const i64 *begins;    // [lists + 1]: first entry of each list
    const i64 *segments;  // [lists + 1]: number of segments of the lists before
    const i64 *parts;     // [lists + 1]: number of segments of those lists before that have several
    // tiles: per bg. segment: most entries per segment. block: tiles per block that share one list, else 1.
    i64 lists, tiles, reach, segment, block;

    // Return where a list ends: at the end of its block's last list.
    DEVICE i64 end(i64 list) const {
        const u32 of_bg = tiles, each = block, tile = static_cast<u32>(list) % of_bg;
        return begins[list - tile + min((tile / each + 1) * each, of_bg)];
    }
};

// Destinations of dk and dv: of segments of lists with several, float32 partial sums, which sum_parts.cu adds.
struct KeyGradients {
    float *part_dk, *part_dv;  // [parts, width, DK], [parts, width, DV]
    u16 *dk, *dv;              // [B*G, S_kv, DK], [B*G, S_kv, DV]
};

// Blocks smaller than a tile (SMALL_BLOCK keys): a tile holds TILE_BLOCKS blocks at any positions, its slots
// (order_blocks.cu). A list holds each row once, with one bit per slot whose block the row selected.
constexpr int BLOCK_KEYS = SMALL_BLOCK ? SMALL_BLOCK : 64, TILE_BLOCKS = 64 / BLOCK_KEYS;
struct BlockTiles {
    const u16 *chosen;  // bits of every entry
    const int *slots;   // [lists, TILE_BLOCKS]: block of each slot; one past the last block for empty slots

    // Return the position of key `key` of a list's tile; S_kv or more if it does not exist.
    DEVICE i64 position(i64 list, int key) const {
        return static_cast<i64>(slots[list * TILE_BLOCKS + key / BLOCK_KEYS]) * BLOCK_KEYS + key % BLOCK_KEYS;
    }
};

// Segment `number` of a list.
struct SegmentId {
    i64 list, number;
};

// Segment `index`, counted over all lists in order.
DEVICE SegmentId segment_at(const KeyToRows &lists, i64 index) {
    i64 list = 0;  // last list whose segments begin at or before `index`
    for (i64 beyond = lists.lists; beyond - list > 1;) {
        i64 middle = (list + beyond) / 2;
        (lists.segments[middle] <= index ? list : beyond) = middle;
    }
    return {list, index - lists.segments[list]};
}

// The work of a CTA: a segment of the list of one tile of WIDTH keys.
template <int WIDTH> struct Segment {
    i64 list, number, begin, end, b, g, bg;
    int first_key;
    bool final;  // the list has no other segment

    DEVICE Segment(const KeyToRows &lists, i64 G, SegmentId id) : list(id.list), number(id.number) {
        final = lists.segments[list + 1] - lists.segments[list] == 1;
        begin = lists.begins[list] + number * lists.segment;
        end = min(begin + lists.segment, lists.end(list));
        bg = list / lists.tiles * SHARED_BY + group_of_cta();
        b = bg / G;
        g = bg % G;
        first_key = static_cast<int>(list % lists.tiles) * WIDTH;
    }
    // The only segment of an implied list (not in memory) of `count` entries.
    DEVICE Segment(const KeyToRows &lists, i64 G, i64 list, i64 entries)
        : list(list), number(0), begin(0), end(entries), b(list / lists.tiles / G), g(list / lists.tiles % G), bg(list / lists.tiles),
          first_key(static_cast<int>(list % lists.tiles) * WIDTH), final(true) {}
};

// Destination of a warp's 16 keys from `key0` on.
struct GradientRows {
    i64 part_row, row;  // row in the partial sums, row in dk
    int keys[2];        // row offsets of the thread's two keys from `row`; negative if a key does not exist
    bool final;

    template <int WIDTH> DEVICE GradientRows(const Segment<WIDTH> &segment, const KeyToRows &lists, i64 S_kv, int key0)
        : part_row(((WINDOW ? 0 : lists.parts[segment.list]) + segment.number) * WIDTH + key0),
          row(segment.bg * S_kv + segment.first_key + key0), final(segment.final) {
        if (SHARED_BY > 1) part_row += group_of_cta() * lists.parts[lists.lists] * WIDTH;
        place(S_kv - segment.first_key - key0);
    }
    DEVICE GradientRows(i64 part_row, i64 row, i64 keys_left, bool final) : part_row(part_row), row(row), final(final) { place(keys_left); }
    DEVICE void place(i64 keys_left) {
        for (int r = 0; r < 2; ++r) {
            const int key = threadIdx.x % 32 / 4 + 8 * r;
            keys[r] = key < keys_left ? key : -1;
        }
    }

    // Store acc * factor to columns from `column0` on. D: columns per row of dk or dv.
    template <int D, class Tile>
    DEVICE void write(Tile &acc, float factor, int column0, float *parts, u16 *result) const {
        parts += part_row * D;
        result += row * D;
        UNROLL for (int i = 0; i < elements<Tile>; i += 2)
            UNROLL for (int r = 0; r < 2; ++r) {
                const int key = threadIdx.x % 32 / 4 + 8 * r, column = column0 + column_of(i);
                if (column >= D) continue;
                const float low = element(acc, r, i) * factor, high = element(acc, r, i + 1) * factor;
                if (!final)
                    *reinterpret_cast<float2 *>(parts + key * D + column) = make_float2(low, high);
                else if (keys[r] >= 0)
                    *reinterpret_cast<u32 *>(result + static_cast<i64>(keys[r]) * D + column) = pack(low, high);
            }
    }
};

// Add the partial sums of a list's segments, `stride` floats apart, in order. Loads are issued in groups, to overlap.
DEVICE float4 add_parts(float4 total, const float *parts, int segments, i64 stride) {
    constexpr int AHEAD = 8;
    for (int first = 0; first < segments; first += AHEAD) {
        float4 part[AHEAD];
        UNROLL for (int j = 0; j < AHEAD; ++j)  // no branch, so that several loads are in flight
            part[j] = *reinterpret_cast<const float4 *>(parts + min(first + j, segments - 1) * stride);
        UNROLL for (int j = 0; j < AHEAD; ++j) {
            if (first + j >= segments) continue;
            total.x += part[j].x;
            total.y += part[j].y;
            total.z += part[j].z;
            total.w += part[j].w;
        }
    }
    return total;
}

// Return the tile of WIDTH keys of entry range * reach + step of row `row` of [B,S,G]; -1 if the range ends before it.
template <int WIDTH> DEVICE int tile_of(const Problem &p, int reach, i64 row, int limit, int entry) {
    int start, end;
    clamped_range(p, ranges_row(row) * p.n + entry / reach, limit, start, end);
    const int tile = start / WIDTH + entry % reach;
    return end > start && tile * WIDTH < end ? tile : -1;
}

// The rows that see any of WIDTH keys from `first_key` on through a window, in steps of TOKENS rows (dkdv_groups.cu).
template <int WIDTH, int TOKENS> struct WindowRows {
    i64 first, count;  // the rows [first, first + count)
    int steps;
    int begun, over;   // in the steps [begun, over) every row sees all keys of the tile
    int rotation;      // leading steps that are processed last: see `step_at`

    DEVICE WindowRows(const Problem &p, i64 first_key) : first(first_row(p, first_key)) {
        const i64 last_key = min(first_key + WIDTH, p.S_kv) - 1;
        count = max(min(first_row(p, last_key + p.window), p.S) - first, 0ll);
        steps = static_cast<int>((count + TOKENS - 1) / TOKENS);
        begun = static_cast<int>((first_row(p, last_key) - first + TOKENS - 1) / TOKENS);
        over = static_cast<int>((first_row(p, first_key + p.window) - first) / TOKENS);
        rotation = steps ? static_cast<u32>(first / TOKENS) % static_cast<u32>(steps) : 0;
    }
    // Return the step at position `i` of the order. CTAs of adjacent tiles read nearly the same rows, more than the L2
    // cache holds: each starts at a multiple of its number of steps, so that they read the same rows at the same time.
    DEVICE int step_at(int i) const { return i < rotation ? i + steps - rotation : i - rotation; }
};

// The lists of a triton-block unit (_triton/units.py), split into segments, and the destinations of their gradients
// (cuda_block.py). Lists are ordered by section of rows, then pair (b, g), then tile of 64 keys. dk and dv of a pair
// accumulate over its sections, which are separate units: in float32, dk without its scale, until the last section.
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
template <int D> DEVICE void load_sums(float (&acc)[D / 2], const float *sums, i64 row, bool adds) {
    sums += row * D;
    UNROLL for (int i = 0; i < elements<float[D / 2]>; i += 2)
        UNROLL for (int r = 0; r < 2; ++r) {
            const int key = threadIdx.x % 32 / 4 + 8 * r;
            const float2 pair = adds ? *reinterpret_cast<const float2 *>(sums + key * D + column_of(i)) : make_float2(0.0f, 0.0f);
            element(acc, r, i) = pair.x;
            element(acc, r, i + 1) = pair.y;
        }
}
