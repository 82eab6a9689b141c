// dq of one query row by the forward's walk over its keys, and delta = sum(do * o) - dlse for the KV side.
//
//   Q_REGISTERS  1: the row's q and do stay in registers; 0: they are read from shared memory at every tile (wide heads)
#include "key_tiles.cuh"

struct Arguments {
    Problem p;
    const u16 *o, *dout;     // o [rows, h, DV], contiguous; do [B,S,G,h,DV]
    const float *lse, *dlse;  // [rows, h], natural; dlse may be null
    u16 *dq;                  // [rows, h, DK]
    float *delta;             // [rows, h]
    i64 stride_dob, stride_dos, stride_dog, stride_doh, head_tiles;
};

constexpr int MERGE = DKP + 8;  // floats of a row of a team's result, padded against bank conflicts

extern "C" __global__ void __launch_bounds__(THREADS) dq_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];  // q, do, then the teams' buffers; at the end the teams' results instead of these
    __shared__ float head_lse[HEADS], head_delta[HEADS];  // lse in base 2
    const Problem &p = x.p;
    u32 head_tiles = x.head_tiles;
    int head0 = blockIdx.x % head_tiles * HEADS;
    Row row = row_of(p, blockIdx.x / head_tiles);
    int limit = row_limit(p, row.b, row.s);
    int lane = threadIdx.x % 32, warp_head = threadIdx.x % TEAM / 32 * 16;
    float c = p.scale_log2;

    u16 *q_tile = memory, *do_tile = q_tile + HEADS * KP, *buffers = do_tile + HEADS * VP;
    copy_heads<DK, KP, HEADS, THREADS>(q_tile, p.q + row.b * p.stride_qb + row.s * p.stride_qs + row.g * p.stride_qg, p.stride_qh, head0, p.h);
    copy_heads<DV, VP, HEADS, THREADS>(do_tile, x.dout + row.b * x.stride_dob + row.s * x.stride_dos + row.g * x.stride_dog, x.stride_doh, head0, p.h);
    commit_copies();
    Walk walk(p, row.number, limit, team_of(), TEAMS);
    Tiles tiles(walk, buffers + team_of() * STAGES * STAGE, p.k + row.b * p.stride_kb + row.g * p.stride_kg,
                p.v + row.b * p.stride_vb + row.g * p.stride_vg);
    wait_copies<STAGES - 1>();
    __syncthreads();  // q and do are there

    for (int head = threadIdx.x / 32; head < HEADS; head += THREADS / 32) {  // a warp sums a head
        i64 out = row.number * p.h + head0 + head;
        bool exists = head0 + head < p.h;
        float sum = 0.0f;
        if (exists)
            for (int column = lane; column < DV; column += 32)
                sum += to_float(x.o[out * DV + column]) * to_float(do_tile[head * VP + column]);
        for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(ALL, sum, i);
        if (lane == 0) {
            if (exists && x.dlse) sum -= x.dlse[out];
            if (exists) x.delta[out] = sum;
            head_delta[head] = sum;
            head_lse[head] = exists ? x.lse[out] * LOG2_E : 0.0f;
        }
    }
    __syncthreads();
    float lse[2] = {head_lse[warp_head + lane / 4], head_lse[warp_head + lane / 4 + 8]};
    float delta[2] = {head_delta[warp_head + lane / 4], head_delta[warp_head + lane / 4 + 8]};
#if Q_REGISTERS
    u32 q[DKP / 16][4], dout[DVP / 16][4];
#pragma unroll
    for (int k = 0; k < DKP / 16; ++k) load_a<KP>(q[k], q_tile, warp_head, 16 * k);
#pragma unroll
    for (int k = 0; k < DVP / 16; ++k) load_a<VP>(dout[k], do_tile, warp_head, 16 * k);
#endif

    float acc[DKP / 8][4] = {};
    for (int count = tiles.take(); count; count = tiles.take()) {
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
#if Q_REGISTERS
        add_products<KP, DKP / 16>(s, q, tiles.k());
        add_products<VP, DVP / 16>(dp, dout, tiles.v());
#else
        add_products<KP, DKP / 16>(s, q_tile, warp_head, tiles.k());
        add_products<VP, DVP / 16>(dp, do_tile, warp_head, tiles.v());
#endif
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float probability = exp2_fast(s[j][i] * c - lse[i / 2]);
                bool seen = 8 * j + lane % 4 * 2 + i % 2 < count;
                s[j][i] = seen ? probability * (dp[j][i] - delta[i / 2]) : 0.0f;
            }
        add_sums<KP, DKP>(acc, s, tiles.k(), 0);
    }

    // Add the teams, in their order.
    wait_copies<0>();
    __syncthreads();  // all have read their last tile
    float *results = reinterpret_cast<float *>(memory);  // [TEAMS][HEADS][MERGE]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float *mine = results + (team_of() * HEADS + warp_head + lane / 4 + 8 * i) * MERGE + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < DKP / 8; ++j) *reinterpret_cast<float2 *>(mine + 8 * j) = make_float2(acc[j][2 * i], acc[j][2 * i + 1]);
    }
    __syncthreads();
    float scale = p.scale;
    for (int i = threadIdx.x; i < HEADS * (DK / 2); i += THREADS) {
        int head = i / (DK / 2), column = i % (DK / 2) * 2;
        if (head0 + head >= p.h) continue;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            const float *theirs = results + (team * HEADS + head) * MERGE + column;
            low += theirs[0];
            high += theirs[1];
        }
        i64 out = row.number * p.h + head0 + head;
        *reinterpret_cast<u32 *>(x.dq + out * DK + column) = pack(low * scale, high * scale);
    }
}
