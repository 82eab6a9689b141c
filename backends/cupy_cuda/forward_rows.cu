// o and lse of one query row: K and V are read once for all heads of a group. Few rows are split among `parts` programs, whose float32
// results combine.cu joins.
//
//   Q_REGISTERS  1: the row's q stays in registers; 0: it is read from shared memory at every tile (wide heads)
//   SPLIT        1: o and lse are the parts' float32 [rows, h, parts, DV] and [rows, h, parts], lse in base 2
#include "walk.cuh"

struct Arguments {
    Problem p;
    void *o;     // [rows, h, DV] of 16-bit numbers, or the parts
    float *lse;  // [rows, h], natural, or the parts'
    i64 parts, head_tiles;
};

constexpr int MERGE = DVP + 8;  // floats of a row of a team's result, padded against bank conflicts

extern "C" __global__ void __launch_bounds__(THREADS) forward_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];  // q, then the teams' buffers; at the end the teams' results instead of these
    __shared__ float team_m[TEAMS][HEADS], team_l[TEAMS][HEADS];
    const Problem &p = x.p;
    u32 parts = x.parts, head_tiles = x.head_tiles, pid = blockIdx.x / parts;
    int part = blockIdx.x % parts, head0 = pid % head_tiles * HEADS;
    Row row = row_of(p, pid / head_tiles);
    int limit = row_limit(p, row.b, row.s);
    int lane = threadIdx.x % 32, warp_head = threadIdx.x % TEAM / 32 * 16;
    float c = p.scale_log2;

    u16 *q_tile = memory, *buffers = memory + HEADS * KP;
    copy_heads<DK, KP>(q_tile, p.q + row.b * p.stride_qb + row.s * p.stride_qs + row.g * p.stride_qg, p.stride_qh, head0, p.h);
    commit_copies();
    Walk walk(p, row.number, limit, part * TEAMS + team_of(), parts * TEAMS);
    Tiles tiles(walk, buffers + team_of() * STAGES * STAGE, p.k + row.b * p.stride_kb + row.g * p.stride_kg,
                p.v + row.b * p.stride_vb + row.g * p.stride_vg);
    wait_copies<STAGES - 1>();
    __syncthreads();  // q is there
#if Q_REGISTERS
    u32 q[DKP / 16][4];
#pragma unroll
    for (int k = 0; k < DKP / 16; ++k) load_a<KP>(q[k], q_tile, warp_head, 16 * k);
#endif

    // Of each head this lane keeps two rows, lane / 4 and that + 8: m and l of both, and of l only what its own columns brought.
    float acc[DVP / 8][4] = {}, m[2] = {LOWEST, LOWEST}, l[2] = {0.0f, 0.0f};
    for (int count = tiles.take(); count; count = tiles.take()) {
        float s[TILE / 8][4] = {};
#if Q_REGISTERS
        add_products<KP, DKP / 16>(s, q, tiles.k());
#else
        add_products<KP, DKP / 16>(s, q_tile, warp_head, tiles.k());
#endif
        if (count < TILE) {  // past the keys
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (8 * j + lane % 4 * 2 + i % 2 >= count) s[j][i] = -infinity();
        }
        float highest[2] = {m[0], m[1]};
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) highest[i / 2] = fmaxf(highest[i / 2], s[j][i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // the four lanes of a row
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(ALL, highest[i], 1));
            highest[i] = fmaxf(highest[i], __shfl_xor_sync(ALL, highest[i], 2));
        }
        if (__any_sync(ALL, highest[0] > m[0] || highest[1] > m[1])) {  // else acc and l stand
            float alpha[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                alpha[i] = exp2_fast((m[i] - highest[i]) * c);
                l[i] *= alpha[i];
                m[i] = highest[i];
            }
#pragma unroll
            for (int j = 0; j < DVP / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[j][i] *= alpha[i / 2];
        }
        float shift[2] = {m[0] * c, m[1] * c};
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[j][i] = exp2_fast(s[j][i] * c - shift[i / 2]);
                l[i / 2] += s[j][i];
            }
        add_sums<VP, DVP>(acc, s, tiles.v(), 0);
    }

    // Join the teams, in their order.
    wait_copies<0>();
    __syncthreads();  // all have read their last tile
    float *results = reinterpret_cast<float *>(memory);  // [TEAMS][HEADS][MERGE]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        l[i] += __shfl_xor_sync(ALL, l[i], 1);
        l[i] += __shfl_xor_sync(ALL, l[i], 2);
        int head = warp_head + lane / 4 + 8 * i;
        if (lane % 4 == 0) {
            team_m[team_of()][head] = m[i];
            team_l[team_of()][head] = l[i];
        }
        float *mine = results + (team_of() * HEADS + head) * MERGE + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < DVP / 8; ++j) *reinterpret_cast<float2 *>(mine + 8 * j) = make_float2(acc[j][2 * i], acc[j][2 * i + 1]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * (DV / 2); i += THREADS) {
        int head = i / (DV / 2), column = i % (DV / 2) * 2;
        if (head0 + head >= p.h) continue;
        float highest = LOWEST, total = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) highest = fmaxf(highest, team_m[team][head]);
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            float weight = exp2_fast((team_m[team][head] - highest) * c);
            const float *theirs = results + (team * HEADS + head) * MERGE + column;
            total += weight * team_l[team][head];
            low += weight * theirs[0];
            high += weight * theirs[1];
        }
        bool seen = !(total == 0.0f);  // a row that saw no key gives 0 and -inf; NaN among its keys shows
        float scale = seen ? 1.0f / total : 0.0f;
        float lse = seen ? highest * c + log2f(total) : -infinity();
        i64 out = (row.number * p.h + head0 + head) * parts + part;
#if SPLIT
        *reinterpret_cast<float2 *>(static_cast<float *>(x.o) + out * DV + column) = make_float2(low * scale, high * scale);
        if (column == 0) x.lse[out] = lse;
#else
        *reinterpret_cast<u32 *>(static_cast<u16 *>(x.o) + out * DV + column) = pack(low * scale, high * scale);
        if (column == 0) x.lse[out] = lse * LN_2;
#endif
    }
}
