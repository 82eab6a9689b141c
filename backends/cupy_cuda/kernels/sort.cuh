// A counting sort of the entries of key_to_rows.cuh into lists, in ascending order (key_to_rows.py):
//   sort_count.cu    the tile of every entry, and how many entries each list has of each chunk
//   sum_counts.cu    where these begin, and the segments of every list
//   sort_scatter.cu  the entries in their places; of few counts also what sum_counts.cu finds, which does not run then
//
// A chunk is consecutive entries of one section of the rows of one bg. Lists go by sections, in each by bg, in each by tiles; so do counts,
// [sections * B*G, chunks, tiles]. Entries, lists and counts fit 31 bits, which is used throughout: 64-bit divisions are slow.
#pragma once
#include "softmax.cuh"

struct Sort {
    i64 entries_per_bg, reach, tiles, pairs, section;  // tiles of one bg, all bg, entries of a section
    i64 chunk, chunks;                                 // entries of a chunk, chunks of a section of one bg
};

// A CTA's chunk: entries [first, end) of bg; none where end <= first.
struct Chunk {
    u32 bg, first, end;
    i64 counts, list;  // where its counts begin; the list of its tile 0

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

// The segments of lists.
struct Segments {
    i64 *before;           // [lists + 1]: how many the lists before have
    i64 longest, several;  // entries; 1: those of lists that have one do not count

    DEVICE int of(int entries) const {
        const u32 most = longest;
        const int segments = static_cast<int>((static_cast<u32>(entries) + most - 1) / most);
        return segments > several ? segments : 0;
    }
};

// What a CTA of sum_counts.cu tells those after it. Such records follow the counts.
struct Published {
    int sums[3], ready;
};
