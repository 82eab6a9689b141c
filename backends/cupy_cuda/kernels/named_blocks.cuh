// Find duplicates among the blocks of a row: one warp takes them in order, 32 at a time, one per lane. The first entry
// that names a block counts, so that results are bit-equal from run to run.
//
//   NAMED_WORDS  words of a bitmap of the blocks that the row has named; 0: no row has more than 32 blocks, or none twice
#pragma once
#include "problem.cuh"

struct NamedBlocks {
    u32 words[NAMED_WORDS ? NAMED_WORDS : 1];

    // Forget the row before, if its successor has no block above `last`.
    DEVICE void clear(int last) {
        if (NAMED_WORDS == 0) return;
        __syncwarp();
        for (int i = threadIdx.x % 32; i <= last / 32; i += 32) words[i] = 0;
        __syncwarp();
    }

    // Return whether this lane's block exists and no earlier entry names it.
    DEVICE bool add(int block, bool exists) {
        const int lane = threadIdx.x % 32;
        const u32 same_block = __match_any_sync(ALL_LANES, exists ? block : -1 - lane);
        bool is_new = exists && __ffs(same_block) - 1 == lane;
        if (NAMED_WORDS == 0) return is_new;
        is_new = is_new && !(words[block / 32] >> block % 32 & 1);
        __syncwarp();
        if (is_new) atomicOr(&words[block / 32], 1u << block % 32);
        __syncwarp();
        return is_new;
    }
};
