// Build the union of the blocks that few tokens of a (b, g) selected, inside the CTA that attends to them, so that no
// plan kernel is needed. Every thread holds one (token, range). The first thread that holds a block writes it to the
// list, with one bit per token.
#pragma once
#include "softmax.cuh"

constexpr int MOST_ENTRIES = 192;  // most (token, range) pairs per tile, at most the number of threads
constexpr int TOKEN_BITS = 8;      // bits for a tile's tokens, below the block number

__shared__ u32 union_entries[MOST_ENTRIES];  // block << TOKEN_BITS | tokens, whole blocks first
__shared__ int2 union_counts;                // number of whole blocks, of all blocks

// Build the list of tokens [first, first + S), by all THREADS threads of the CTA.
template <int THREADS> DEVICE void make_union(const Problem &p, u32 b, u32 g, u32 first, u32 S) {
    static_assert(THREADS >= MOST_ENTRIES, "one entry per thread");
    constexpr u32 NONE = 0xffffffffu;
    const u32 n = p.n, e = threadIdx.x, token = e / n;
    u32 block = NONE, tokens = 0;
    int lowest = static_cast<int>(p.S_kv);
    for (u32 s = 0; s < S; ++s) lowest = min(lowest, row_limit(p, b, first + s));
    if (token < S) {
        int start, end;
        const i64 row = ranges_row((static_cast<i64>(b) * p.S + first + token) * p.G + g);
        clamped_range(p, row * n + e % n, row_limit(p, b, first + token), start, end);
        if (end > start) block = start / BLOCK;
        union_entries[e] = block;
    }
    __syncthreads();
    bool listed = block != NONE;
    if (listed)
        for (u32 s = 0, other = 0; s < S; ++s)
            for (u32 i = 0; i < n; ++i, ++other)
                if (union_entries[other] == block) {
                    tokens |= 1u << s;
                    listed = listed && other >= e;
                }
    const bool whole = listed && (block + 1) * static_cast<i64>(BLOCK) <= lowest;
    int upto[2] = {listed, whole}, total[2];
    block_prefix_sum<THREADS>(upto, total);  // also: all have read the entries
    if (listed) union_entries[(whole ? upto[1] : total[1] + upto[0] - upto[1]) - 1] = block << TOKEN_BITS | tokens;
    if (e == 0) union_counts = make_int2(total[1], total[0]);
    __syncthreads();
}
