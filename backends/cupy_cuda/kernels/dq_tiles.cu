// Backward pass on Hopper: dq of tiles of tokens, and delta for dk and dv (token_tiles.cuh).
//
// do is held in registers as the operand of do v^T, so that wgmma reads half as much shared memory, and do (and o) of
// the next tile can be loaded as soon as this one's are read. WITH_O: for compressed keys or a window a tile has few
// steps, so o comes through TMA with do; loading it from memory for delta would take much of the tile's time.
#include "token_tiles.cuh"

constexpr bool WITH_O = BY_ARITHMETIC;
constexpr bool DO_IN_REGISTERS = DK <= 128;  // if acc leaves enough registers
static_assert(DO_IN_REGISTERS || Q_STAGES == 1, "else do would follow another stage of q");
constexpr int DO_BYTES = DV / 64 * PANEL;
constexpr int ROW_BYTES = Q_STAGES * Q_BYTES + DO_BYTES + (WITH_O ? DO_BYTES : 0);  // per consumer

struct Maps {
    TensorMap q, d_o, k, v;
};
struct MapsWithO : Maps {
    TensorMap o_rows;
};
struct Arguments : If<WITH_O, MapsWithO, Maps> {
    Problem p;
    TilePlan plan;
    QueryGradients to;
};

// The `math` of consume_steps: one consumer's dq over a tile.
struct TileGradient : Gradient<StepReader> {
    u32 d_out[DV / 16][4];  // do, an operand

    using Gradient::Gradient;
    // Read do, compute delta and store it. do_tile: do and (WITH_O) o in shared memory.
    DEVICE void load_gradients(const Arguments &x, const TokenTile &tile, int consumer, const unsigned char *do_tile) {
        float sum[2] = {0.0f, 0.0f};
        UNROLL for (int k = 0; k < DV / 16; ++k) {
            load_operand(d_out[k], do_tile, k);
            u32 o[4];
            if (WITH_O) load_operand(o, do_tile + DO_BYTES, k);
            UNROLL for (int i = 0; i < 4; ++i) {
                if (!WITH_O) {
                    const u16 *row = x.to.o + RowPair::index(x.p, tile, consumer, i % 2) * DV;
                    o[i] = rows.bit[i % 2] ? *reinterpret_cast<const u32 *>(row + k * 16 + i / 2 * 8 + threadIdx.x % 4 * 2) : 0u;
                }
                sum[i % 2] = dot2(d_out[k][i], o[i], sum[i % 2]);
            }
        }
        begin(x, tile, consumer, sum);
    }
    DEVICE void begin_products(const Step &step) {
        const u32 keys = steps.keys(step);
        wgmma_a_bt<DK>(s, q_tile, keys);
        if (DO_IN_REGISTERS) wgmma_commit();
        if (DO_IN_REGISTERS) wgmma_a_bt<DV>(dp, d_out, keys + K_BYTES / 16);
        else wgmma_a_bt<DV>(dp, q_tile + Q_BYTES / 16, keys + K_BYTES / 16);
        wgmma_commit();
    }
    DEVICE void begin_sums(const Step &step) {
        wgmma_add_a_b<DK>(acc, ds, steps.keys(step) + TRANSPOSED);
        wgmma_commit();
    }
    template <int PENDING> DEVICE void probabilities(const Step &step, int key) {
        const float shift[2] = {step.rows & rows.bit[0] ? lse[0] : infinity(), step.rows & rows.bit[1] ? lse[1] : infinity()};
        if constexpr (DO_IN_REGISTERS) {
            wgmma_wait<PENDING + 1>();  // compute p while dp is in flight
            UNROLL for (int r = 0; r < 2; ++r)
                UNROLL for (int i = 0; i < KEYS / 4; ++i) element(s, r, i) = exp2_fast(element(s, r, i) * c - shift[r]);
            wgmma_wait<PENDING>();
            UNROLL for (int r = 0; r < 2; ++r)
                UNROLL for (int i = 0; i < KEYS / 4; ++i) element(s, r, i) *= element(dp, r, i) - delta[r];
        } else {
            wgmma_wait<PENDING>();
            logit_gradients(s, dp, c, shift, delta);
        }
        if (key != NO_MASK) rows.mask(s, key, 0.0f);
    }
};

DEVICE void differentiate(const Arguments &x, unsigned char *stages, unsigned char *row_memory, Shared &shared, int consumer) {
    const Problem &p = x.p;
    const u32 q_tiles = uniform(operand(shared_address(row_memory)));
    StepReader steps{shared.steps, consumer, uniform(operand(shared_address(stages)))};
    TileScheduler scheduler{shared.tiles, x.plan};
    while (scheduler.next_tile()) {
        const TokenTile tile = scheduler.tile(p.G);
        const RowPair rows(p, tile, consumer);
        const auto at = scheduler.at<Q_STAGES>();
        TileGradient gradient(steps, Q_STAGES == 1 ? q_tiles : uniform(q_tiles + at.stage * (Q_BYTES / 16)), rows, p.scale_log2);
        steps.begin_tile(scheduler.counts.y * STEPS);
        gradient.load_lse(x, tile, consumer);
        shared.gradients[consumer].wait_full(scheduler.at<1>());
        gradient.load_gradients(x, tile, consumer, row_memory + Q_STAGES * Q_BYTES);
        __syncwarp();  // all lanes have read do and o
        if (DO_IN_REGISTERS) shared.gradients[consumer].release(0);
        gradient.to_base_2();
        shared.q[consumer].wait_full(at);
        consume_steps(steps, scheduler.counts.x * STEPS, shared.q[consumer], at.stage, gradient);
        if (!DO_IN_REGISTERS) shared.gradients[consumer].release(0);
        gradient.write(x, tile, consumer);
    }
}

template <class Arguments>
DEVICE void produce_tiles(const Arguments &x, unsigned char *row_memory, Shared &shared, int consumer) {
    unsigned char *do_tile = row_memory + Q_STAGES * Q_BYTES;
    TileScheduler scheduler{shared.tiles, x.plan};
    while (scheduler.next_tile()) {
        const TokenTile tile = scheduler.tile(x.p.G);
        produce_rows<DK>(shared.q[consumer], scheduler.at<Q_STAGES>(), row_memory, tile, consumer, x.q);
        if constexpr (WITH_O) produce_rows<DV, DV>(shared.gradients[consumer], scheduler.at<1>(), do_tile, tile, consumer, x.d_o, x.o_rows);
        else produce_rows<DV>(shared.gradients[consumer], scheduler.at<1>(), do_tile, tile, consumer, x.d_o);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // rows of the consumers, stages of K and V
    __shared__ Shared shared;
    unsigned char *stages = memory + CONSUMERS * ROW_BYTES;
    if (threadIdx.x == 0) shared.init();
    wait_for_kernel_ahead();
    start_next_kernel();
    __syncthreads();
    run_warpgroups([&](int consumer) { differentiate(x, stages, memory + consumer * ROW_BYTES, shared, consumer); },
                   [&](int producer) {
                       if (producer == 0) produce_steps(x, stages, shared);
                       else if (producer <= CONSUMERS) produce_tiles(x, memory + (producer - 1) * ROW_BYTES, shared, producer - 1);
                   });
}
