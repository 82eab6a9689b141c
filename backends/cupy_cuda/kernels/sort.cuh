// Counting sort of the entries of key_to_rows.cuh into lists, in ascending order (key_to_rows.py): sort_count.cu
// computes the tile of every entry and counts the entries per chunk and list; sum_counts.cu computes prefix sums of the
// counts, and the number of segments per list; sort_scatter.cu scatters the entries, and sums few counts itself.
//
// A chunk is a run of entries of one section of the rows of one bg. Lists are ordered by section, bg, tile; counts are
// [sections * B*G, chunks, tiles]. Entries, lists and counts fit in 31 bits, because 64-bit divisions are slow.
#pragma once
#include "softmax.cuh"

struct Sort {
    i64 entries_per_bg, reach, tiles, pairs, section;  // tiles per bg, B*G, entries per section
    i64 chunk, chunks;                                 // entries per chunk, chunks per section of a bg
};

// A CTA's chunk: entries [first, end) of bg; empty if end <= first.
struct Chunk {
    u32 bg, first, end;
    i64 counts, list;  // index of its first count; list of its tile 0

    DEVICE Chunk(const Sort &sort, u32 index) {
        const u32 chunks = sort.chunks, pairs = sort.pairs, part = index / chunks, section = part / pairs;
        bg = part % pairs;
        const u32 begin = section * static_cast<u32>(sort.section);
        first = begin + index % chunks * static_cast<u32>(sort.chunk);
        end = min(first + static_cast<u32>(sort.chunk), min(begin + static_cast<u32>(sort.section), static_cast<u32>(sort.entries_per_bg)));
        counts = static_cast<i64>(index) * sort.tiles;
        list = static_cast<i64>(part) * sort.tiles;
    }
};

// Number of segments of the lists.
struct Segments {
    i64 *before;           // [lists + 1]: segments of the lists before
    i64 longest, several;  // longest: entries per segment. several = 1: do not count lists with a single segment

    DEVICE int of(int entries) const {
        const u32 most = longest;
        const int segments = static_cast<int>((static_cast<u32>(entries) + most - 1) / most);
        return segments > several ? segments : 0;
    }
};

// What a CTA of sum_counts.cu publishes for later CTAs, behind the counts in memory: sums of its lists.
struct Published {
    int sums[3], ready;
};
