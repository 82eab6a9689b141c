// o and lse of one query row: K and V are read once for all heads of a group. Few rows are split among `parts` blocks. Those of a cluster
// (sm_90) read each other's results; without clusters, or in more parts than a cluster has blocks, they write them, and combine.cu joins them.
//
//   Q_REGISTERS  1: the row's q stays in registers; 0: it is read from shared memory at every tile (wide heads)
//   SPLIT        1: o and lse are the parts' float32 [rows, h, parts, DV] and [rows, h, parts], lse in base 2
//   CLUSTER      blocks of a cluster, which are a row's parts then; 1: no clusters
#include "key_tiles.cuh"

struct Arguments {
    Problem p;
    void *o;     // [rows, h, DV] of 16-bit numbers, or the parts
    float *lse;  // [rows, h], natural, or the parts'
    i64 parts, head_tiles;
};

constexpr int MERGE = DVP + 8;  // floats of a row of a team's result, padded against bank conflicts

// What some of a row's keys gave for two columns: acc and l relative to m.
struct Result {
    float m, l, low, high;
};

// Results number 0 to N - 1, joined in their order.
template <int N, class Of>
DEVICE Result join(float c, Of of) {
    Result all[N], sum = {LOWEST, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        all[i] = of(i);
        sum.m = fmaxf(sum.m, all[i].m);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float weight = exp2_fast((all[i].m - sum.m) * c);
        sum.l += weight * all[i].l;
        sum.low += weight * all[i].low;
        sum.high += weight * all[i].high;
    }
    return sum;
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS) forward_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];  // q, then the teams' buffers; at the end the teams' results instead of these
    const Problem &p = x.p;
    u32 parts = x.parts, head_tiles = x.head_tiles, pid = blockIdx.x / parts;
    int part = blockIdx.x % parts, head0 = pid % head_tiles * HEADS;
    Row row = row_of(p, pid / head_tiles);
    int limit = row_limit(p, row.b, row.s);
    int lane = threadIdx.x % 32, warp_head = threadIdx.x % TEAM / 32 * 16;
    float c = p.scale_log2;

    u16 *q_tile = memory, *buffers = memory + HEADS * KP;
    copy_heads<DK, KP, HEADS, THREADS>(q_tile, p.q + row.b * p.stride_qb + row.s * p.stride_qs + row.g * p.stride_qg, p.stride_qh, head0, p.h);
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
    float *results = reinterpret_cast<float *>(memory);  // [TEAMS][HEADS][MERGE], and the block's in the first team's place
    float *team_m = results + TEAMS * HEADS * MERGE, *team_l = team_m + TEAMS * HEADS;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        l[i] += __shfl_xor_sync(ALL, l[i], 1);
        l[i] += __shfl_xor_sync(ALL, l[i], 2);
        int row_of_team = team_of() * HEADS + warp_head + lane / 4 + 8 * i;
        if (lane % 4 == 0) {
            team_m[row_of_team] = m[i];
            team_l[row_of_team] = l[i];
        }
        float *mine = results + row_of_team * MERGE + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < DVP / 8; ++j) *reinterpret_cast<float2 *>(mine + 8 * j) = make_float2(acc[j][2 * i], acc[j][2 * i + 1]);
    }
    __syncthreads();
    auto join_teams = [&](int head, int column) {
        return join<TEAMS>(c, [&](int team) {
            const int at = team * HEADS + head;
            const float *theirs = results + at * MERGE + column;
            return Result{team_m[at], team_l[at], theirs[0], theirs[1]};
        });
    };
    int first = threadIdx.x, step = THREADS;
#if CLUSTER > 1
    float *block_m = team_l + TEAMS * HEADS, *block_l = block_m + HEADS;
    for (int i = threadIdx.x; i < HEADS * (DV / 2); i += THREADS) {
        const int head = i / (DV / 2), column = i % (DV / 2) * 2;
        const Result sum = join_teams(head, column);
        *reinterpret_cast<float2 *>(results + head * MERGE + column) = make_float2(sum.low, sum.high);
        if (column == 0) {
            block_m[head] = sum.m;
            block_l[head] = sum.l;
        }
    }
    cluster_barrier();
    first += part * THREADS, step *= CLUSTER;  // each block writes a share
#endif
    for (int i = first; i < HEADS * (DV / 2); i += step) {
        const int head = i / (DV / 2), column = i % (DV / 2) * 2;
        if (head0 + head >= p.h) continue;
#if CLUSTER > 1
        const float *there = results + head * MERGE + column;
        const Result sum = join<CLUSTER>(c, [&](int block) {
            return Result{of_block(block_m + head, block), of_block(block_l + head, block), of_block(there, block), of_block(there + 1, block)};
        });
#else
        const Result sum = join_teams(head, column);
#endif
        bool seen = !(sum.l == 0.0f);  // a row that saw no key gives 0 and -inf; NaN among its keys shows
        float scale = seen ? 1.0f / sum.l : 0.0f;
        float lse = seen ? sum.m * c + log2f(sum.l) : -infinity();
        i64 out = row.number * p.h + head0 + head;
#if SPLIT
        out = out * parts + part;
        *reinterpret_cast<float2 *>(static_cast<float *>(x.o) + out * DV + column) = make_float2(sum.low * scale, sum.high * scale);
        if (column == 0) x.lse[out] = lse;
#else
        *reinterpret_cast<u32 *>(static_cast<u16 *>(x.o) + out * DV + column) = pack(sum.low * scale, sum.high * scale);
        if (column == 0) x.lse[out] = lse * LN_2;
#endif
    }
#if CLUSTER > 1
    cluster_barrier();  // what others read stays until they have
#endif
}
