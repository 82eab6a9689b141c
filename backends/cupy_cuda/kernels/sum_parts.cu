// dk and dv of the KV tiles whose lists have several pieces: their parts, added in the order of the pieces (dkdv_tiles.cu). Zeros for tiles
// that nobody chose.
#include "common.cuh"

struct Arguments {
    const i64 *pieces, *parts;             // [lists + 1]
    const float *part_dk, *part_dv;        // [parts, WIDTH, DK], [parts, WIDTH, DV]
    u16 *dk, *dv;                          // [B*G, S_kv, DK], [B*G, S_kv, DV]
    i64 S_kv, tiles;
};

constexpr int WIDTH = 16 * KEY_WARPS;
constexpr int KEYS = 8;  // of a block
constexpr int THREADS = 128;

template <int D>
DEVICE void sum(const float *parts, int pieces, u16 *result, i64 keys_left) {
    for (int i = threadIdx.x; i < KEYS * (D / 2); i += THREADS) {
        int key = i / (D / 2), column = i % (D / 2) * 2;
        if (key >= keys_left) return;
        float low = 0.0f, high = 0.0f;
#pragma unroll 4
        for (int piece = 0; piece < pieces; ++piece) {
            float2 part = *reinterpret_cast<const float2 *>(parts + (static_cast<i64>(piece) * WIDTH + key) * D + column);
            low += part.x;
            high += part.y;
        }
        *reinterpret_cast<u32 *>(result + key * D + column) = pack(low, high);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_parts(const __grid_constant__ Arguments x) {
    i64 list = blockIdx.x / (WIDTH / KEYS);
    int key0 = blockIdx.x % (WIDTH / KEYS) * KEYS;
    int pieces = static_cast<int>(x.pieces[list + 1] - x.pieces[list]);
    if (pieces == 1) return;  // which wrote its result itself
    i64 start = list % x.tiles * WIDTH + key0, key = list / x.tiles * x.S_kv + start, part = x.parts[list] * WIDTH + key0;
    sum<DK>(x.part_dk + part * DK, pieces, x.dk + key * DK, x.S_kv - start);
    sum<DV>(x.part_dv + part * DV, pieces, x.dv + key * DV, x.S_kv - start);
}
