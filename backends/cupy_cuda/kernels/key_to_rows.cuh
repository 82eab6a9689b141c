// The inverse of the selection: for every tile of keys the list of rows that selected any of them (key_to_rows.py), and what the kernels of
// dk and dv share.
//
// With bg = b * G + g, entry e of bg is (s * n + range) * reach + step: row s, and the step-th tile of `width` keys that the range reaches.
// List bg * tiles + tile holds the entries of that tile in ascending order. A counting sort makes the lists (sort.cuh). Long ones
// are split into segments, one CTA's work each.
//
// Blocks of several tiles have one list, for a row that sees one of these tiles whole sees all before it. An entry is a (row, range), in the
// order of the last tile that the row sees; the list of a tile is the block's from the tile's own entries on.
#pragma once
#include "softmax.cuh"

struct KeyToRows {
    const int *entries;   // e, list after list
    const i64 *begins;    // [lists + 1]: where a list begins among the entries; its own end where the next one begins
    const i64 *segments;  // [lists + 1]: segments of the lists before
    const i64 *parts;     // [lists + 1]: segments of the lists before that have several
    i64 lists, tiles, reach, segment, block;  // tiles of one bg, entries of a segment at most, tiles of a block that has one list; 1: none

    // Where a list ends: with those of its block.
    DEVICE i64 end(i64 list) const {
        const u32 of_bg = tiles, each = block, tile = static_cast<u32>(list) % of_bg;
        return begins[list - tile + min((tile / each + 1) * each, of_bg)];
    }
};

// dk and dv. A list of one segment is written as it is; of others the segments' float32 sums go to the parts, which sum_parts.cu adds.
struct KeyGradients {
    float *part_dk, *part_dv;  // [parts, width, DK], [parts, width, DV]
    u16 *dk, *dv;              // [B*G, S_kv, DK], [B*G, S_kv, DV]
};

// Blocks smaller than a tile (SMALL_BLOCK keys, key_to_rows.py): a tile is TILE_BLOCKS blocks of any positions, its slots (order_blocks.cu), and a
// list has each row once, with a bit for each slot whose block the row selected.
#ifndef SMALL_BLOCK
#define SMALL_BLOCK 0
#endif
#if SMALL_BLOCK
constexpr int TILE_BLOCKS = 64 / SMALL_BLOCK;

struct BlockTiles {
    const u16 *chosen;  // the bits of every entry
    const int *slots;   // [lists, TILE_BLOCKS]: a block; one past the last block in slots that have none

    // The position of key `key` of the tile of a list; S_kv or more if there is no such key.
    DEVICE i64 position(i64 list, int key) const {
        return static_cast<i64>(slots[list * TILE_BLOCKS + key / SMALL_BLOCK]) * SMALL_BLOCK + key % SMALL_BLOCK;
    }
};
#endif

// Segment `number` of a list.
struct SegmentId {
    i64 list, number;
};

// Segment `index` of all lists, one list after the other.
DEVICE SegmentId segment_at(const KeyToRows &lists, i64 index) {
    i64 list = 0;  // the last one whose segments begin at or before `index`
    for (i64 beyond = lists.lists; beyond - list > 1;) {
        i64 middle = (list + beyond) / 2;
        (lists.segments[middle] <= index ? list : beyond) = middle;
    }
    return {list, index - lists.segments[list]};
}

// What a CTA computes: a segment of the list of one tile of WIDTH keys.
template <int WIDTH>
struct Segment {
    i64 list, number, begin, end, b, g, bg;
    int first_key;
    bool final;  // the list has no other segment

    DEVICE Segment(const KeyToRows &lists, i64 G, SegmentId id) : list(id.list), number(id.number) {
        final = lists.segments[list + 1] - lists.segments[list] == 1;
        begin = lists.begins[list] + number * lists.segment;
        end = min(begin + lists.segment, lists.end(list));
        bg = list / lists.tiles;
        b = bg / G;
        g = bg % G;
        first_key = static_cast<int>(list % lists.tiles) * WIDTH;
    }
    // The only segment of a list that is not in memory, of so many entries.
    DEVICE Segment(const KeyToRows &lists, i64 G, i64 list, i64 entries)
        : list(list), number(0), begin(0), end(entries), b(list / lists.tiles / G), g(list / lists.tiles % G), bg(list / lists.tiles),
          first_key(static_cast<int>(list % lists.tiles) * WIDTH), final(true) {}
};

// Where the parts of a list begin; the lists of a window have none, and are not in memory.
DEVICE i64 first_part(const KeyToRows &lists, i64 list) {
#ifdef WINDOW
    return 0;
#else
    return lists.parts[list];
#endif
}

// Where a warp's 16 keys from `key0` on go.
struct GradientRows {
    i64 part_row, row;  // among the parts' rows, among dk's rows
    int keys[2];        // how many rows after `row` the thread's two keys go; negative: there is no such key
    bool final;

    template <int WIDTH>
    DEVICE GradientRows(const Segment<WIDTH> &segment, const KeyToRows &lists, i64 S_kv, int key0)
        : part_row((first_part(lists, segment.list) + segment.number) * WIDTH + key0),
          row(segment.bg * S_kv + segment.first_key + key0), final(segment.final) {
        place(S_kv - segment.first_key - key0);
    }
    DEVICE GradientRows(i64 part_row, i64 row, i64 keys_left, bool final) : part_row(part_row), row(row), final(final) { place(keys_left); }
    DEVICE void place(i64 keys_left) {
        for (int r = 0; r < 2; ++r) {
            const int key = threadIdx.x % 32 / 4 + 8 * r;
            keys[r] = key < keys_left ? key : -1;
        }
    }

    // acc * factor, columns from `column0` on; D: columns of a row of dk or dv.
    template <int D, class Tile>
    DEVICE void write(Tile &acc, float factor, int column0, float *parts, u16 *result) const {
        parts += part_row * D;
        result += row * D;
#pragma unroll
        for (int i = 0; i < elements<Tile>; i += 2)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
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

// The parts of a list's segments, each `stride` floats after the one before, added to `total` in their order. Most lists have few: a chain
// of loads that wait for each other would take longer than their bytes.
DEVICE float4 add_parts(float4 total, const float *parts, int segments, i64 stride) {
    constexpr int AHEAD = 8;
    for (int first = 0; first < segments; first += AHEAD) {
        float4 part[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)  // without a branch, so that several are under way
            part[j] = *reinterpret_cast<const float4 *>(parts + min(first + j, segments - 1) * stride);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            if (first + j >= segments) continue;
            total.x += part[j].x;
            total.y += part[j].y;
            total.z += part[j].z;
            total.w += part[j].w;
        }
    }
    return total;
}
