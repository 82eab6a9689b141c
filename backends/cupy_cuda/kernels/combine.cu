// Merge o and lse of rows that forward_rows.cu split over several CTAs with disjoint keys, in order of the splits.
//
//   lse = log2 sum_i 2^lse_i,  o = sum_i 2^(lse_i - lse) o_i          (a split without keys has lse_i = -inf)
//
// Grid: one CTA per 4 rows of B*S*G*h, one warp per row. MOST_SPLITS: most splits per row, a multiple of 32.
#include "softmax.cuh"

struct Arguments {
    const float *split_o, *split_lse;  // [rows, splits, DV], [rows, splits], base 2; rows = B*S*G*h
    u16 *o;                            // [rows, DV]
    float *lse;                        // [rows], natural
    i64 rows, splits;
};

constexpr int WARPS = 4, PER_LANE = MOST_SPLITS / 32;

extern "C" __global__ void __launch_bounds__(32 * WARPS) combine(const __grid_constant__ Arguments x) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, splits = x.splits;
    if (row >= x.rows) return;
    float mine[PER_LANE];  // lse of split 32 * i + lane, and later its weight
    UNROLL for (int i = 0; i < PER_LANE; ++i) mine[i] = i * 32 + lane < splits ? x.split_lse[row * splits + i * 32 + lane] : -infinity();
    float highest = LOWEST, total = 0.0f;
    UNROLL for (int i = 0; i < PER_LANE; ++i) highest = fmaxf(highest, mine[i]);
    highest = warp_max(highest);
    UNROLL for (int i = 0; i < PER_LANE; ++i) total += exp2_fast(mine[i] - highest);
    total = warp_sum(total);
    const bool any_key = !(total == 0.0f);
    const float lse = any_key ? highest + log2f(total) : -infinity();
    UNROLL for (int i = 0; i < PER_LANE; ++i) mine[i] = any_key ? exp2_fast(mine[i] - lse) : 0.0f;
    for (int first = 0; first < DV; first += 64) {
        const int column = first + 2 * lane;
        float low = 0.0f, high = 0.0f;
        UNROLL for (int i = 0; i < PER_LANE; ++i) {
#pragma unroll 8
            for (int j = 0; j < min(32, splits - i * 32); ++j) {
                const float weight = __shfl_sync(ALL_LANES, mine[i], j);
                if (column < DV) {
                    const float2 part = *reinterpret_cast<const float2 *>(x.split_o + (row * splits + i * 32 + j) * DV + column);
                    low += weight * part.x;
                    high += weight * part.y;
                }
            }
        }
        if (column < DV) *reinterpret_cast<u32 *>(x.o + row * DV + column) = pack(low, high);
    }
    if (lane == 0) x.lse[row] = lse * LN_2;
}
