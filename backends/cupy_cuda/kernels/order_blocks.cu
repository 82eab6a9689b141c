// Assign blocks to tiles (block_tiles.cuh): sort them by the share of the rows seeing a block that selected it, in
// powers of two, and then by position. This decides which keys are computed together; results change only by rounding.
//
// Grid: one CTA per (b, g). Each thread takes adjacent blocks.
#include "key_to_rows.cuh"

constexpr int THREADS = 512, CLASSES = 12;  // the last one: less than 2^-11 of the rows

struct Arguments {
    const int *counts;  // [B*G, blocks], from count_blocks.cu
    i64 S, S_kv, blocks, tiles;
    int *places;  // [B*G, blocks]: tile * TILE_BLOCKS + slot of each block
    int *slots;   // [B*G, tiles * TILE_BLOCKS]: the block of each slot; `blocks` if it is empty
};

DEVICE int class_of(const Arguments &x, int block, int count) {
    const i64 unseen = block * static_cast<i64>(SMALL_BLOCK) - (x.S_kv - x.S), rows = x.S - max(unseen, 0ll);
    int halvings = 0;
    while (halvings < CLASSES - 1 && static_cast<i64>(count) * SAMPLED << (halvings + 1) < rows) ++halvings;
    return halvings;
}

extern "C" __global__ void __launch_bounds__(THREADS) order_blocks(const __grid_constant__ Arguments x) {
    const int blocks = static_cast<int>(x.blocks), share = (blocks + THREADS - 1) / THREADS;
    const int first = min(static_cast<int>(threadIdx.x) * share, blocks), end = min(first + share, blocks);
    const i64 bg = blockIdx.x, all_slots = x.tiles * TILE_BLOCKS;
    const int *counts = x.counts + bg * x.blocks;
    int *places = x.places + bg * x.blocks, *slots = x.slots + bg * all_slots;
    int own[CLASSES], upto[CLASSES], all[CLASSES];
    UNROLL for (int c = 0; c < CLASSES; ++c) own[c] = 0;
    for (int block = first; block < end; ++block) {
        const int kind = class_of(x, block, counts[block]);
        UNROLL for (int c = 0; c < CLASSES; ++c) own[c] += c == kind;
    }
    UNROLL for (int c = 0; c < CLASSES; ++c) upto[c] = own[c];
    block_prefix_sum<THREADS>(upto, all);
    int before = 0, next[CLASSES];  // blocks of earlier classes; position of the thread's next block of each class
    UNROLL for (int c = 0; c < CLASSES; ++c) {
        next[c] = before + upto[c] - own[c];
        before += all[c];
    }
    for (int block = first; block < end; ++block) {
        const int kind = class_of(x, block, counts[block]);
        int place = 0;
        UNROLL for (int c = 0; c < CLASSES; ++c)
            if (c == kind) place = next[c]++;
        places[block] = place;
        slots[place] = block;
    }
    for (int place = blocks + threadIdx.x; place < all_slots; place += THREADS) slots[place] = blocks;
}
