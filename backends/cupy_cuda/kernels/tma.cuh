// Pipelines between producer and consumer warps, and TMA loads of tiles into shared memory.
#pragma once
#include "hopper.cuh"

// The next stage of a ring of N, and the parity of its barriers.
template <int N>
struct PipelineState {
    int stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == N) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Barriers of N buffers: producers fill them, consumers release them.
template <int N>
struct Pipeline {
    u64 full[N], empty[N];

    DEVICE void init(int producer_arrivals, int consumer_arrivals) {
        for (int i = 0; i < N; ++i) {
            mbarrier_init(&full[i], producer_arrivals);
            mbarrier_init(&empty[i], consumer_arrivals);
        }
    }
    DEVICE void wait_full(const PipelineState<N> &at) { mbarrier_wait(&full[at.stage], at.parity); }
    DEVICE void wait_empty(const PipelineState<N> &at) { mbarrier_wait(&empty[at.stage], at.parity ^ 1); }
    // One lane arrives for its warp.
    DEVICE void announce(int stage) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&full[stage]);
    }
    DEVICE void release(int stage) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[stage]);
    }
};

// TMA stores a tile in panels of 64 columns: rows of 128 bytes, whose 16-byte chunks are swizzled
// (CU_TENSOR_MAP_SWIZZLE_128B).
constexpr int PANEL = 64 * 128;  // bytes of 64 rows
// Return the offset of chunk c of a row in its panel.
DEVICE u32 swizzled(int row, int c) { return row * 128 + (c ^ row % 8) * 16; }

// Load a tile of COLUMNS columns of k or v in boxes of BOX columns (one panel). ONCE: the tile is read once.
template <int COLUMNS, bool ONCE = false, int BOX = 64>
DEVICE void tma_load_key_tile(unsigned char *to, const TensorMap *map, u64 *bar, int key, int g, int b) {
    UNROLL for (int c = 0; c < COLUMNS; c += BOX)
        if (ONCE) tma_load_keys_once(to + c / BOX * PANEL, map, bar, c, key, g, b);
        else tma_load_keys(to + c / BOX * PANEL, map, bar, c, key, g, b);
}
// The same for q or do.
template <int COLUMNS>
DEVICE void tma_load_row_tile(unsigned char *to, const TensorMap *map, u64 *bar, int g, int s, int b) {
    UNROLL for (int c = 0; c < COLUMNS; c += 64) tma_load_rows(to + c / 64 * PANEL, map, bar, c, g, s, b);
}
