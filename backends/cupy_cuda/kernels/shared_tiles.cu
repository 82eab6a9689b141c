// Find the tiles of keys that all of some adjacent tokens selected (cuda-block): join_partials.cu attends to these,
// block_partials.cu to all others.
//
// Grid: one CTA per 64 tokens of a pair (b, g), in groups of TQ = 64 / H. An entry of a row (key_to_rows.cuh) is shared
// if every token of its group has an entry for the same tile; only the first token's entries are searched for.
//
//   TILE     keys per tile
//   H, EACH  heads per group, a divisor of 64; entries per row, n * reach, at most 64
#include "key_to_rows.cuh"

constexpr int TQ = 64 / H, TOKENS = 64, THREADS = 128;

struct Arguments {
    Problem p;
    i64 reach;
    u64 *shared, *listed;  // [B,S,G], one bit per entry of a row: shared entries; all others that reach a tile
};

extern "C" __global__ void __launch_bounds__(THREADS) shared_tiles(const __grid_constant__ Arguments x) {
    __shared__ int tiles[EACH][TOKENS];  // -1: the entry reaches no tile
    __shared__ u64 found[TOKENS];        // entries of the group's first token whose tile this token has, too
    const Problem &p = x.p;
    const u32 S = p.S, G = p.G, ctas = (S + TOKENS - 1) / TOKENS, bg = blockIdx.x / ctas, first = blockIdx.x % ctas * TOKENS;
    const int tokens = static_cast<int>(min(S - first, static_cast<u32>(TOKENS)));
    const u32 b = bg / G, g = bg % G;
    for (int i = threadIdx.x; i < EACH * tokens; i += THREADS) {
        const i64 s = first + i / EACH;
        tiles[i % EACH][i / EACH] = tile_of<TILE>(p, static_cast<int>(x.reach), (b * p.S + s) * G + g, row_limit(p, b, s), i % EACH);
    }
    __syncthreads();
    const int token = threadIdx.x, leader = token / TQ * TQ;
    if (token < tokens) {
        u64 mine = 0;
        for (int e = 0; e < EACH; ++e) {
            const int tile = tiles[e][leader];
            bool has = false;
            for (int other = 0; other < EACH; ++other) has |= tiles[other][token] == tile;
            if (has && tile >= 0) mine |= 1ull << e;
        }
        found[token] = mine;
    }
    __syncthreads();
    if (token >= tokens) return;
    u64 common = found[leader], shared = 0, real = 0;
    for (int other = leader; other < min(leader + TQ, tokens); ++other) common &= found[other];
    for (int e = 0; e < EACH; ++e) {
        const int tile = tiles[e][token];
        if (tile >= 0) real |= 1ull << e;
        for (u64 rest = common; rest; rest &= rest - 1)
            if (tiles[__ffsll(rest) - 1][leader] == tile) shared |= 1ull << e;
    }
    const i64 row = (b * p.S + first + token) * G + g;
    x.shared[row] = shared;
    x.listed[row] = real & ~shared;
}
