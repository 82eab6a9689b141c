// Count how many of every SAMPLED-th row selected each block: an estimate is enough for order_blocks.cu. Sums of
// integers do not depend on the order of the atomic additions. Grid: one CTA per (b, g, sampled row).
#include "key_to_rows.cuh"

constexpr int THREADS = 128;

struct Arguments {
    Problem p;
    i64 blocks, rows;  // blocks per sequence; sampled rows per bg
    int *counts;       // [B*G, blocks], zeros on entry
};

extern "C" __global__ void __launch_bounds__(THREADS) count_blocks(const __grid_constant__ Arguments x) {
    const Problem &p = x.p;
    const u32 rows = x.rows, G = p.G, bg = blockIdx.x / rows, b = bg / G, g = bg % G;
    const i64 s = static_cast<i64>(blockIdx.x % rows) * SAMPLED;
    const int limit = row_limit(p, b, s);
    for (u32 i = threadIdx.x; i < p.n; i += THREADS) {
        int start, end;
        clamped_range(p, ((b * p.S + s) * G + g) * p.n + i, limit, start, end);
        if (end > start) atomicAdd(&x.counts[bg * x.blocks + start / SMALL_BLOCK], 1);
    }
}
