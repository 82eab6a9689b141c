// Partial results of one row and head, computed by several programs over disjoint keys, joined by their log-sum-exp in a fixed order:
// o = sum_i w_i o_i with w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i; a part that saw no key has lse_i = -inf and w_i = 0.
#include "common.cuh"

struct Arguments {
    const float *part_o, *part_lse;  // [rows, parts, DV], [rows, parts], base 2; rows = B*S*G*h
    u16 *o;                          // [rows, DV]
    float *lse;                      // [rows], natural
    i64 rows, parts;
};

constexpr int WARPS = 4;  // one row each

extern "C" __global__ void __launch_bounds__(32 * WARPS) combine(const __grid_constant__ Arguments x) {
    const i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, parts = x.parts;
    if (row >= x.rows) return;
    float mine[MOST_PARTS / 32];  // a part a lane: one after another, each would wait for memory by itself
#pragma unroll
    for (int i = 0; i < MOST_PARTS / 32; ++i) mine[i] = i * 32 + lane < parts ? x.part_lse[row * parts + i * 32 + lane] : -infinity();
    float highest = LOWEST, total = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_PARTS / 32; ++i) highest = fmaxf(highest, mine[i]);
    for (int far = 16; far > 0; far /= 2) highest = fmaxf(highest, __shfl_xor_sync(ALL, highest, far));
#pragma unroll
    for (int i = 0; i < MOST_PARTS / 32; ++i) total += exp2_fast(mine[i] - highest);
    for (int far = 16; far > 0; far /= 2) total += __shfl_xor_sync(ALL, total, far);
    const bool seen = !(total == 0.0f);
    const float lse = seen ? highest + log2f(total) : -infinity();
#pragma unroll
    for (int i = 0; i < MOST_PARTS / 32; ++i) mine[i] = seen ? exp2_fast(mine[i] - lse) : 0.0f;  // the part's weight
    for (int first = 0; first < DV; first += 64) {
        const int column = first + 2 * lane;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int half = 0; half < MOST_PARTS / 32; ++half) {
#pragma unroll 8
            for (int i = 0; i < min(32, parts - half * 32); ++i) {
                const float weight = __shfl_sync(ALL, mine[half], i);
                if (column < DV) {
                    const float2 part = *reinterpret_cast<const float2 *>(x.part_o + (row * parts + half * 32 + i) * DV + column);
                    low += weight * part.x;
                    high += weight * part.y;
                }
            }
        }
        if (column < DV) *reinterpret_cast<u32 *>(x.o + row * DV + column) = pack(low, high);
    }
    if (lane == 0) x.lse[row] = lse * LN_2;
}
