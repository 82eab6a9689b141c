// Sum dk and dv of tiles whose lists have several segments: add the partial sums in the order of the segments. Store
// zeros for tiles that no row selected. Grid: one CTA per (group that shares the lists, list, KEYS keys); few keys if
// there are few lists, because each CTA loads its partial sums in sequence.
#include "key_to_rows.cuh"

struct Arguments {
    const i64 *segments, *parts;  // [lists + 1]: see KeyToRows
    KeyGradients to;
    i64 S_kv, tiles;
    BlockTiles blocks;  // SMALL_BLOCK
};

constexpr int WIDTH = 16 * KEY_WARPS;
constexpr int THREADS = 128;

// The row of dk and dv of key `key` of the tile of a list; negative if there is no such key.
DEVICE i64 row_of_key(const Arguments &x, i64 list, int key) {
    const i64 position = SMALL_BLOCK ? x.blocks.position(list, key) : list % x.tiles * WIDTH + key;
    return position < x.S_kv ? (list / x.tiles * SHARED_BY + group_of_cta()) * x.S_kv + position : -1;
}

template <int D>
DEVICE void sum(const Arguments &x, i64 list, int key0, const float *parts, int segments, u16 *result) {
    for (int i = threadIdx.x; i < KEYS * (D / 4); i += THREADS) {
        const int at = i * 4;
        const i64 row = row_of_key(x, list, key0 + at / D);
        if (row < 0) continue;
        const float4 total = add_parts(make_float4(0.0f, 0.0f, 0.0f, 0.0f), parts + at, segments, WIDTH * D);
        *reinterpret_cast<uint2 *>(result + row * D + at % D) = make_uint2(pack(total.x, total.y), pack(total.z, total.w));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ Arguments x) {
    i64 list = cta_of_group() / (WIDTH / KEYS);
    int key0 = cta_of_group() % (WIDTH / KEYS) * KEYS;
    int segments = static_cast<int>(x.segments[list + 1] - x.segments[list]);
    if (segments == 1) return;  // which wrote its result itself
    const i64 lists = gridDim.x / (WIDTH / KEYS) / SHARED_BY, before = SHARED_BY == 1 ? 0 : group_of_cta() * x.parts[lists];
    const i64 part = (before + x.parts[list]) * WIDTH + key0;
    sum<DK>(x, list, key0, x.to.part_dk + part * DK, segments, x.to.dk);
    sum<DV>(x, list, key0, x.to.part_dv + part * DV, segments, x.to.dv);
}
