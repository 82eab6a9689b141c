// Backward pass row by row, on any GPU from sm_80: dq of one query row, and delta for dk and dv.
//
//   delta = sum(do * o) - dlse,  p = 2^(c q k^T - lse),  ds = p * (do v^T - delta),  dq = scale * sum_j ds_j k_j
//
// Grid: one CTA per (row, HEADS heads). Tiles and loads: as in forward_rows.cu (key_tiles.cuh). ds = 0 past a tile's
// last key, where k and v are zeros.
#include "key_tiles.cuh"

struct Arguments {
    Problem p;
    HeadsTensor d_o;          // [B,S,G,h,DV]
    const u16 *o;             // [rows, h, DV], contiguous
    const float *lse, *dlse;  // [rows, h], natural; dlse may be null
    u16 *dq;                  // [rows, h, DK]
    float *delta;             // [rows, h]
    i64 head_tiles;
};

constexpr int MERGE = DKP + 8;  // floats of a head's row in shared memory, padded against bank conflicts

// Compute delta of every head, one warp per head. Shared memory receives it, too, and lse in base 2.
DEVICE void compute_delta(const Arguments &x, const RowHeads &heads, const u16 *do_tile, float *head_lse, float *head_delta) {
    const int lane = threadIdx.x % 32;
    for (int head = threadIdx.x / 32; head < HEADS; head += THREADS / 32) {
        const i64 out = heads.index(x.p, head);
        const bool exists = heads.head0 + head < x.p.h;
        float sum = 0.0f;
        if (exists)
            for (int column = lane; column < DV; column += 32)
                sum += to_float(x.o[out * DV + column]) * to_float(do_tile[head * VP + column]);
        sum = warp_sum(sum);
        if (lane == 0) {
            if (exists && x.dlse) sum -= x.dlse[out];
            if (exists) x.delta[out] = sum;
            head_delta[head] = sum;
            head_lse[head] = exists ? x.lse[out] * LOG2_E : 0.0f;
        }
    }
}

// Compute acc = sum of ds k over this team's tiles.
DEVICE void accumulate_dq(const Problem &p, const u16 *q_tile, const u16 *do_tile, int warp_head, KeyPipeline &keys, const float *head_lse,
                          const float *head_delta, float (&acc)[DKP / 8][4]) {
    const int row = warp_head + threadIdx.x % 32 / 4;
    const float c = p.scale_log2, lse[2] = {head_lse[row], head_lse[row + 8]}, delta[2] = {head_delta[row], head_delta[row + 8]};
    const HeadsOperand<KP> q(q_tile, warp_head);
    const HeadsOperand<VP> d_o(do_tile, warp_head);
    for (int count = keys.next_tile(); count; count = keys.next_tile()) {
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
        q.add_products(s, keys.k());
        d_o.add_products(dp, keys.v());
        logit_gradients(s, dp, c, lse, delta, count);
        add_s_b<KP, DKP>(acc, s, keys.k(), 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dq_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];  // q, do, then the teams' buffers; later the teams' results
    __shared__ float head_lse[HEADS], head_delta[HEADS];
    const Problem &p = x.p;
    const RowHeads heads(p, blockIdx.x, x.head_tiles);
    float acc[DKP / 8][4] = {};

    u16 *q_tile = memory, *do_tile = q_tile + HEADS * KP, *buffers = do_tile + HEADS * VP;
    copy_heads<DK, KP, HEADS, THREADS>(q_tile, p.q, heads.row, heads.head0, p.h);
    copy_heads<DV, VP, HEADS, THREADS>(do_tile, x.d_o, heads.row, heads.head0, p.h);
    cp_async_commit();
    const KeyIterator tiles(p, heads.row, heads.team, TEAMS);
    KeyPipeline keys(tiles, buffers + heads.team * STAGES * STAGE, heads.row);
    cp_async_wait<STAGES - 1>();
    __syncthreads();  // q and do are loaded
    compute_delta(x, heads, do_tile, head_lse, head_delta);
    __syncthreads();
    accumulate_dq(p, q_tile, do_tile, heads.warp_head, keys, head_lse, head_delta, acc);

    // Add the teams' results in order.
    cp_async_wait<0>();
    __syncthreads();  // all threads have read their last tile
    float *results = reinterpret_cast<float *>(memory);  // [TEAMS][HEADS][MERGE]
    store_rows<MERGE>(results + (heads.team * HEADS + heads.warp_head) * MERGE, acc);
    __syncthreads();
    const float scale = p.scale;
    for (int i = threadIdx.x; i < HEADS * (DK / 2); i += THREADS) {
        const int head = i / (DK / 2), column = i % (DK / 2) * 2;
        if (heads.head0 + head >= p.h) continue;
        float low = 0.0f, high = 0.0f;
        UNROLL for (int team = 0; team < TEAMS; ++team) {
            const float *theirs = results + (team * HEADS + head) * MERGE + column;
            low += theirs[0];
            high += theirs[1];
        }
        *reinterpret_cast<u32 *>(x.dq + heads.index(p, head) * DK + column) = pack(low * scale, high * scale);
    }
}
