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
    i64 row = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32, parts = x.parts;
    if (row >= x.rows) return;
    const float *part_lse = x.part_lse + row * parts;
    float highest = LOWEST, total = 0.0f;
    for (int i = 0; i < parts; ++i) highest = fmaxf(highest, part_lse[i]);
    for (int i = 0; i < parts; ++i) total += exp2_fast(part_lse[i] - highest);
    bool seen = !(total == 0.0f);
    float lse = seen ? highest + log2f(total) : -infinity();
    for (int column = 2 * lane; column < DV; column += 64) {
        float low = 0.0f, high = 0.0f;
#pragma unroll 4
        for (int i = 0; i < parts; ++i) {
            float weight = seen ? exp2_fast(part_lse[i] - lse) : 0.0f;
            float2 part = *reinterpret_cast<const float2 *>(x.part_o + (row * parts + i) * DV + column);
            low += weight * part.x;
            high += weight * part.y;
        }
        *reinterpret_cast<u32 *>(x.o + row * DV + column) = pack(low, high);
    }
    if (lane == 0) x.lse[row] = lse * LN_2;
}
