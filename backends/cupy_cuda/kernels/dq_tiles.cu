// dq of tiles of adjacent tokens on Hopper (token_tiles.cuh: grid, tiles, TMA, masks), and delta for dk and dv.
//
//   delta = sum(do * o) - dlse,  p = 2^(c q k^T - lse),  ds = p * (do v^T - delta),  dq = scale * sum_j ds_j k_j
//
// Of compressed keys a tile has few steps, so that reading o from memory for delta would be a large part of its time: o comes with q and do.
#include "token_tiles.cuh"

#ifdef COMPRESS_STRIDE
constexpr bool WITH_O = true;
#else
constexpr bool WITH_O = false;
#endif
constexpr int Q_BYTES = DK / 64 * PANEL, DO_BYTES = DV / 64 * PANEL;
constexpr int ROW_BYTES = Q_BYTES + DO_BYTES + (WITH_O ? DO_BYTES : 0);  // of a consumer

struct Arguments {
    TensorMap q, d_o, k, v;
#ifdef COMPRESS_STRIDE
    TensorMap o_rows;
#endif
    Problem p;
    TilePlan plan;
    HeadsTensor d_out;        // do [B,S,G,h,DV]
    const u16 *o;             // [B,S,G,h,DV], contiguous
    const float *lse, *dlse;  // [B,S,G,h]; dlse may be null
    u16 *dq;                  // [B,S,G,h,DK]
    float *delta;             // [B,S,G,h]
};

// sum(a * b) of eight elements each.
DEVICE float dot8(uint4 a, uint4 b, float sum) {
    const u16 *as = reinterpret_cast<const u16 *>(&a), *bs = reinterpret_cast<const u16 *>(&b);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += to_float(as[j]) * to_float(bs[j]);
    return sum;
}

// delta of a consumer's rows, two threads a row, to memory and to `sums`. row_memory: WITH_O, the rows, which have arrived.
DEVICE void compute_delta(const Arguments &x, const TokenTile &tile, int consumer, const unsigned char *row_memory, float *sums) {
    const int row = threadIdx.x % 128 / 2, half = threadIdx.x % 2, token = row / H, head = row % H;
    const i64 s = tile.token(consumer) + token, out = ((tile.b * x.p.S + s) * x.p.G + tile.g) * H + head;
    const bool exists = token < TQ && s < x.p.S;
    float sum = 0.0f;
    if (WITH_O) {
        const unsigned char *d_out = row_memory + Q_BYTES, *o = d_out + DO_BYTES;
#pragma unroll 4
        for (int i = 0; i < DV / 2 && exists; i += 8) {
            const int column = half * (DV / 2) + i, at = column / 64 * PANEL + swizzled(row, column % 64 / 8);
            sum = dot8(*reinterpret_cast<const uint4 *>(o + at), *reinterpret_cast<const uint4 *>(d_out + at), sum);
        }
    } else if (exists) {
        const u16 *o = x.o + out * DV + half * (DV / 2);
        const u16 *d_out = x.d_out.heads(tile.b, s, tile.g) + head * x.d_out.stride_h + half * (DV / 2);
#pragma unroll 4
        for (int i = 0; i < DV / 2; i += 8)
            sum = dot8(*reinterpret_cast<const uint4 *>(o + i), *reinterpret_cast<const uint4 *>(d_out + i), sum);
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    if (exists && x.dlse) sum -= x.dlse[out];
    if (half == 0) {
        sums[row] = sum;
        if (exists) x.delta[out] = sum;
    }
}

// What a consumer computes of a tile (consume_steps).
struct QueryGradient {
    StepReader &steps;
    const u32 q_tile, do_tile;  // operands
    const RowPair &rows;
    const float c;
    float delta[2], lse[2];  // lse in base 2; infinity for a row without keys, so that p = 0
    float acc[DK / 2], s[KEYS / 2], dp[KEYS / 2];
    u32 ds[KEYS / 16][4];  // an operand

    DEVICE QueryGradient(StepReader &reader, u32 q, const RowPair &pair, float scale_log2)
        : steps(reader), q_tile(q), do_tile(q + Q_BYTES / 16), rows(pair), c(scale_log2) {
#pragma unroll
        for (int i = 0; i < DK / 2; ++i) acc[i] = 0.0f;
    }
    DEVICE void begin_products(const Step &step) {
        const u32 keys = steps.keys(step);
        wgmma_a_bt<DK>(s, q_tile, keys);
        wgmma_a_bt<DV>(dp, do_tile, keys + K_BYTES / 16);
        wgmma_commit();
    }
    DEVICE void begin_sums(const Step &step) {
        wgmma_add_a_b<DK>(acc, ds, steps.keys(step) + TRANSPOSED);
        wgmma_commit();
    }
    DEVICE void probabilities(const Step &step, int key) {
        const float shift[2] = {step.rows & rows.bit[0] ? lse[0] : infinity(), step.rows & rows.bit[1] ? lse[1] : infinity()};
        logit_gradients(s, dp, c, shift, delta);
        if (key != NO_MASK) mask_columns(s, key, rows.limit, 0.0f);
    }
    DEVICE void finish_probabilities() {}
    DEVICE void update_operand() { as_operand(ds, s); }
};

DEVICE void differentiate(const Arguments &x, unsigned char *stages, unsigned char *row_memory, float *sums, Shared &shared, int consumer) {
    const Problem &p = x.p;
    const u32 q_tile = uniform(operand(shared_address(row_memory)));
    StepReader steps(shared.steps, consumer, stages);
    TileScheduler scheduler(shared.tiles, x.plan);
    while (scheduler.next_tile()) {
        const TokenTile tile(scheduler.number, x.plan, p.G);
        const RowPair rows(p, tile, consumer);
        QueryGradient gradient(steps, q_tile, rows, p.scale_log2);
        steps.begin_tile(scheduler.counts.y * STEPS);
        float lse[2];
        if (WITH_O) {
#pragma unroll
            for (int r = 0; r < 2; ++r) lse[r] = rows.bit[r] ? x.lse[RowPair::index(p, tile, consumer, r)] : -infinity();
            shared.rows[consumer].wait_full({0, scheduler.parity()});
        }
        compute_delta(x, tile, consumer, row_memory, sums);
        named_barrier<128>(consumer + 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            gradient.delta[r] = sums[RowPair::row(r)];
            if (!WITH_O) lse[r] = rows.bit[r] ? x.lse[RowPair::index(p, tile, consumer, r)] : -infinity();
            gradient.lse[r] = lse[r] == -infinity() ? infinity() : lse[r] * LOG2_E;
        }
        if (!WITH_O) shared.rows[consumer].wait_full({0, scheduler.parity()});
        consume_steps(steps, x.plan, p.G, tile, scheduler.counts, shared.rows[consumer], gradient);

        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) scale[r] = gradient.lse[r] == infinity() ? 0.0f : static_cast<float>(p.scale);
        write_rows<DK>(gradient.acc, scale, x.dq, p, tile, consumer);
        named_barrier<128>(consumer + 1);  // all have read their sums
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q and do of the consumers, the stages
    __shared__ Shared shared;
    __shared__ float sums[CONSUMERS][64];
    unsigned char *stages = memory + CONSUMERS * ROW_BYTES;
    const int warpgroup = threadIdx.x / 128, producer = threadIdx.x / 32 - 4 * CONSUMERS;
    if (threadIdx.x == 0) shared.init();
    __syncthreads();
    if (warpgroup < CONSUMERS) {
        reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(true);
        differentiate(x, stages, memory + warpgroup * ROW_BYTES, sums[warpgroup], shared, warpgroup);
        return;
    }
    reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(false);
    if (producer == 0) produce_steps(x.k, x.v, x.p, x.plan, stages, shared);
    else if (producer <= CONSUMERS) {
        unsigned char *rows = memory + (producer - 1) * ROW_BYTES;
#ifdef COMPRESS_STRIDE
        produce_rows<DK, DV, DV>(x.p, x.plan, rows, shared, producer - 1, x.q, x.d_o, x.o_rows);
#else
        produce_rows<DK, DV>(x.p, x.plan, rows, shared, producer - 1, x.q, x.d_o);
#endif
    }
}
