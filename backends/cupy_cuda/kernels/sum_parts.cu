// dk and dv of the tiles of keys whose lists have several segments: their parts, added in the order of the segments. Zeros for tiles that
// no row selected. Grid: one CTA per (list, KEYS keys): few keys if there are few lists, because a CTA waits for one part after the other.
#include "key_to_rows.cuh"

struct Arguments {
    const i64 *segments, *parts;  // [lists + 1]: see KeyToRows
    KeyGradients to;
    i64 S_kv, tiles;
};

constexpr int WIDTH = 16 * KEY_WARPS;
constexpr int THREADS = 128;

template <int D>
DEVICE void sum(const float *parts, int segments, u16 *result, i64 keys_left) {
    for (int i = threadIdx.x; i < KEYS * (D / 2); i += THREADS) {
        int key = i / (D / 2), column = i % (D / 2) * 2;
        if (key >= keys_left) return;
        float low = 0.0f, high = 0.0f;
#pragma unroll 16
        for (int segment = 0; segment < segments; ++segment) {
            float2 part = *reinterpret_cast<const float2 *>(parts + (static_cast<i64>(segment) * WIDTH + key) * D + column);
            low += part.x;
            high += part.y;
        }
        *reinterpret_cast<u32 *>(result + key * D + column) = pack(low, high);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ Arguments x) {
    i64 list = blockIdx.x / (WIDTH / KEYS);
    int key0 = blockIdx.x % (WIDTH / KEYS) * KEYS;
    int segments = static_cast<int>(x.segments[list + 1] - x.segments[list]);
    if (segments == 1) return;  // which wrote its result itself
    i64 start = list % x.tiles * WIDTH + key0, key = list / x.tiles * x.S_kv + start, part = x.parts[list] * WIDTH + key0;
    sum<DK>(x.to.part_dk + part * DK, segments, x.to.dk + key * DK, x.S_kv - start);
    sum<DV>(x.to.part_dv + part * DV, segments, x.to.dv + key * DV, x.S_kv - start);
}
