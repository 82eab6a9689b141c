// Tiles in shared memory on Hopper: pipelines between producer and consumer warps, TMA loads, and wgmma products.
#pragma once
#include "hopper.cuh"

// The next stage of a ring of N, and the parity of its barriers.
template <int N> struct PipelineState {
    int stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// Barriers of N buffers: producers fill them, consumers release them.
template <int N> struct Pipeline {
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

// A tile is in panels of 64 columns: rows of 128 bytes, whose 16-byte chunks are swizzled (CU_TENSOR_MAP_SWIZZLE_128B).
constexpr int PANEL = 64 * 128;  // bytes of 64 rows
// Return the offset of chunk c of a row in its panel.
DEVICE u32 swizzled(int row, int c) { return row * 128 + (c ^ row % 8) * 16; }

// Load a tile of COLUMNS columns of k or v in boxes of BOX columns (one panel of NEXT bytes). ONCE: the tile is read once.
template <int COLUMNS, bool ONCE = false, int BOX = 64, int NEXT = PANEL>
DEVICE void tma_load_key_tile(unsigned char *to, const TensorMap *map, u64 *bar, int key, int g, int b) {
    UNROLL for (int c = 0; c < COLUMNS; c += BOX)
        if (ONCE) tma_load_keys_once(to + c / BOX * NEXT, map, bar, c, key, g, b);
        else tma_load_keys(to + c / BOX * NEXT, map, bar, c, key, g, b);
}
// The same for q or do.
template <int COLUMNS>
DEVICE void tma_load_row_tile(unsigned char *to, const TensorMap *map, u64 *bar, int g, int s, int b) {
    UNROLL for (int c = 0; c < COLUMNS; c += 64) tma_load_rows(to + c / 64 * PANEL, map, bar, c, g, s, b);
}

// Broadcast a value that is equal in all lanes, so that the compiler keeps it in a uniform register.
DEVICE u32 uniform(u32 x) { return __shfl_sync(ALL_LANES, x, 0); }

// An operand in shared memory is a tile in swizzled panels, given by the lower half of its matrix descriptor, in units
// of 16 bytes. Groups of eight rows are GROUP bytes apart.
DEVICE u32 operand(u32 address) { return (address & 0x3ffff) >> 4; }
constexpr u32 TRANSPOSED = PANEL / 16 << 16;  // add if the tile's columns are the operand's rows
template <int GROUP = 1024>
DEVICE u64 descriptor(u32 lower) { return lower | static_cast<u64>(GROUP >> 4 | 1 << 30) << 32; }

// d = a b^T, 64 x 2 N, for operands of COLUMNS columns. NEXT: bytes between 64-column panels of b.
template <int COLUMNS, int NEXT = PANEL, int GROUP = 1024, int N> DEVICE void wgmma_a_bt(float (&d)[N], u32 a, u32 b) {
    UNROLL for (int k = 0; k < COLUMNS / 16; ++k)
        wgmma_shared(d, descriptor(a + (k / 4 * PANEL + k % 4 * 32) / 16), descriptor<GROUP>(b + (k / 4 * NEXT + k % 4 * 32) / 16), k > 0);
}
// The same with a in registers.
template <int COLUMNS> DEVICE void wgmma_a_bt(float (&d)[32], const u32 (&a)[COLUMNS / 16][4], u32 b) {
    UNROLL for (int k = 0; k < COLUMNS / 16; ++k) wgmma_registers_bt(d, a[k], descriptor(b + (k / 4 * PANEL + k % 4 * 32) / 16), k > 0);
}
// Columns [16 k, 16 k + 16) of a warpgroup's 64 rows in swizzled panels: operand a of wgmma_registers.
DEVICE void load_operand(u32 (&a)[4], const unsigned char *tile, int k) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, chunk = k % 4 * 2 + threadIdx.x % 32 / 16;
    ldmatrix(a, reinterpret_cast<const u16 *>(tile + k / 4 * PANEL + swizzled(row, chunk)));
}
// acc += a b, 64 x COLUMNS, for a (64 x 16 K) in registers and operand b of 16 K rows, TRANSPOSED.
template <int COLUMNS, int GROUP = 1024, int K>
DEVICE void wgmma_add_a_b(float (&acc)[COLUMNS / 2], const u32 (&a)[K][4], u32 b) {
    UNROLL for (int k = 0; k < K; ++k) wgmma_registers(acc, a[k], descriptor<GROUP>(b + k * 2 * GROUP / 16));
}
// d = a^T b, 64 x 64, for operands of 16 K rows and 64 columns, both TRANSPOSED.
template <int K> DEVICE void wgmma_at_b(float (&d)[32], u32 a, u32 b) {
    UNROLL for (int k = 0; k < K; ++k) wgmma_shared_transposed(d, descriptor(a + k * 2048 / 16), descriptor(b + k * 2048 / 16), k > 0);
}
// A 64 x 16 K accumulator, rounded to 16 bits: operand a of wgmma_add_a_b.
template <int K> DEVICE void as_operand(u32 (&a)[K][4], const float (&s)[8 * K]) {
    UNROLL for (int k = 0; k < K; ++k)
        UNROLL for (int i = 0; i < 4; ++i) a[k][i] = pack(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
}

// Store row r of acc * scale, of which this lane has columns [32 j + 8 c, 32 j + 8 c + 8), c its number in its quad.
// ONCE: the row is read once.
template <bool ONCE = false, int N> DEVICE void write_row(u16 *to, const float (&acc)[N], int r, float scale) {
    to += threadIdx.x % 4 * 8;
    UNROLL for (int j = 0; j < N / 16; ++j) {
        u32 x[4];
        UNROLL for (int n = 0; n < 4; ++n) x[n] = pack(acc[16 * j + 4 * n + 2 * r] * scale, acc[16 * j + 4 * n + 2 * r + 1] * scale);
        const uint4 eight = make_uint4(x[0], x[1], x[2], x[3]);
        if (ONCE) store_once(to + 32 * j, eight);
        else *reinterpret_cast<uint4 *>(to + 32 * j) = eight;
    }
}
