// Persistent, warp-specialized kernels over tiles of tokens on Hopper: what forward_tiles.cu and dq_tiles.cu share.
//
// Grid: at most one CTA per multiprocessor; of FEW_TOKENS, one CTA per tile, two per multiprocessor. A tile has TOKENS = CONSUMERS * TQ
//   tokens of one (b, g), adjacent ones or in an order (token_order.cuh), with their H heads. CTAs pull tiles from an atomic counter,
//   because tiles differ in length.
// Warpgroups: each of CONSUMERS consumer warpgroups owns a 64-row accumulator, TQ = 64 / H tokens times H heads. In the producer warpgroup
//   warp 0 loads K and V of the union of the tile's blocks (tile_plan.cuh), once for all consumers, in steps of KEYS keys, through a
//   pipeline of STAGES stages; warp 1 + i loads q (and do) of consumer i, a tile ahead. All by TMA.
// Every consumer waits for every step, and computes those that one of its tokens selected. Rows that did not select the step's block are
// masked by a shift of their logits to -inf, at no cost per element.
// Pages: of whole steps. The page of a block is read with the block, that of its later pages in turn, if some row sees a key there; else the
//   step's page is -1, where TMA reads nothing and writes zeros.
// Masks: a tile's steps begin with its partial blocks, which the causal clamp, a window or the end of the cache cuts for some row: they
//   take a mask per element. What no row that selected a block sees of it is zeroed in shared memory, since p = 0 would not cancel NaN.
//   Whole blocks follow, which every row of the tile sees to their last key: no mask.
//
// One head: two consumers have the same 64 tokens, because the union of more is longer. They take the steps of a tile in turn (IN_TURNS).
//
//   H          heads of a group (1 to 64)
//   CONSUMERS  consumer warpgroups
//   STAGES     stages of the pipeline of steps
//   BLOCK      keys of a block, a multiple of 64
//   Q_STAGES   stages of a consumer's q: with 2, that of the next tile comes while this one is computed
#pragma once
#include "tile_plan.cuh"
#include "wgmma.cuh"

constexpr int KEYS = 64, STEPS = BLOCK / KEYS;  // steps of a block
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int PER_SM = CONSUMERS == 1 ? 2 : 1;                                                                // CTAs
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 152 : CONSUMERS == 2 ? 224 : 200, PRODUCER_REGISTERS = 56;  // a thread
#ifdef FEW_TOKENS
constexpr bool ONCE = true;  // K and V are read by one CTA alone
#else
constexpr bool ONCE = false;
#endif

// The tiles of a CTA, which one warp fetches for all others.
struct TileQueue {
    static constexpr int AHEAD = 2;
    Pipeline<AHEAD> pipeline;
    u32 number[AHEAD];
    int2 counts[AHEAD];
#ifdef ORDER_TOKENS
    unsigned char tokens[AHEAD + 1][TOKENS + 1];  // read until a warp takes its next tile; H may not divide 64: one more is looked at
#endif
};

// A warp's view of the queue: which tile it is at.
struct TileScheduler {
    TileQueue &queue;
    const TilePlan &plan;
    int taken = 0;
    u32 number;   // of the tile
    int2 counts;  // its whole blocks, all blocks

    DEVICE TileScheduler(TileQueue &shared, const TilePlan &lists) : queue(shared), plan(lists) {}
    DEVICE PipelineState<TileQueue::AHEAD> state() const { return {taken % TileQueue::AHEAD, taken / TileQueue::AHEAD % 2}; }
    // Of a pipeline with one stage per tile.
    template <int N>
    DEVICE PipelineState<N> at() const { return {(taken - 1) % N, (taken - 1) / N % 2}; }
    DEVICE TokenTile tile(u32 G) const {
        TokenTile tile(number, plan, G);
#ifdef ORDER_TOKENS
        tile.tokens = queue.tokens[at<TileQueue::AHEAD + 1>().stage];
#endif
        return tile;
    }

    // The producer of steps: publish a tile, past the last one, too; returns whether it is one.
    DEVICE bool publish(u32 tile, const Problem &p) {
        const auto at = state();
        number = tile;
        counts = number < plan.all_tiles ? block_counts(p, plan, TokenTile(number, plan, p.G)) : make_int2(0, 0);
        queue.pipeline.wait_empty(at);
#ifdef ORDER_TOKENS
        if (number < plan.all_tiles) {
            const TokenTile tile(number, plan, p.G);
            const unsigned char *order = tile.order(plan, p.G);
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < TOKENS; i += 32) queue.tokens[taken % (TileQueue::AHEAD + 1)][i] = order[i];
        }
#endif
        __syncwarp();  // all lanes have seen it: the next phase may pass
        if (threadIdx.x % 32 == 0) {
            queue.number[at.stage] = number;
            queue.counts[at.stage] = counts;
            mbarrier_arrive(&queue.pipeline.full[at.stage]);
        }
        ++taken;
        return number < plan.all_tiles;
    }
    // All other warps: whether there is another tile.
    DEVICE bool next_tile() {
        const auto at = state();
        queue.pipeline.wait_full(at);
        number = queue.number[at.stage];
        counts = queue.counts[at.stage];
        __syncwarp();
        queue.pipeline.release(at.stage);
        ++taken;
        return number < plan.all_tiles;
    }
};

// K and V of the steps, and which tokens selected them.
struct StepPipeline : Pipeline<STAGES> {
    u64 raw;                            // K and V that are still to be zeroed in part
    TokenBits rows[STAGES][CONSUMERS];  // bit r: token r of the consumer selected the step's block
    int keys[STAGES];                   // the first key
    int visible[STAGES];                // keys from there on that some row sees, or more
};

struct Shared {
    StepPipeline steps;
    TileQueue tiles;
    Pipeline<Q_STAGES> q[CONSUMERS];
    Pipeline<1> gradients[CONSUMERS];  // do (and o), of dq_tiles.cu

    DEVICE void init() {
        steps.init(1, 4 * CONSUMERS);           // a lane of every consumer warp
        tiles.pipeline.init(1, 5 * CONSUMERS);  // likewise, and of the warps that load rows
        for (int i = 0; i < CONSUMERS; ++i) {
            q[i].init(1, 4);
            gradients[i].init(1, 4);
        }
        mbarrier_init(&steps.raw, 1);
        mbarrier_fence_init();
    }
};

// One past the last key that some row of `rows`, which are the tile's, may see.
DEVICE int last_visible(const Problem &p, const TokenTile &tile, u64 rows) {
    int last = 0;
    for (int r = threadIdx.x % 32; r < TOKENS; r += 32)
        if (rows >> r & 1) last = max(last, row_limit(p, tile.b, tile.token(0, r)));
    return __reduce_max_sync(ALL_LANES, last);
}

// Zero a step's keys and values from row `first` on. Whole rows: the swizzle within them does not matter.
DEVICE void zero_rows(unsigned char *stage, int first) {
#pragma unroll 1
    for (int panel = 0; panel < STAGE_BYTES / PANEL; ++panel)
        for (int i = first * 8 + threadIdx.x % 32; i < KEYS * 8; i += 32)
            *reinterpret_cast<uint4 *>(stage + panel * PANEL + i * 16) = make_uint4(0, 0, 0, 0);
}

// Producer warp: the tiles of the CTA, and K and V of their steps.
DEVICE void produce_steps(const TensorMap &k_map, const TensorMap &v_map, const Problem &p, const TilePlan &plan, unsigned char *stages,
                          Shared &shared) {
    StepPipeline &steps = shared.steps;
    const int lane = threadIdx.x % 32;
    int raw_parity = 0;
    PipelineState<STAGES> at;
    TileScheduler scheduler(shared.tiles, plan);
    for (u32 coming = blockIdx.x; scheduler.publish(coming, p);) {
        const TokenTile tile = scheduler.tile(p.G);
        const int2 counts = scheduler.counts;
        const int partial = counts.y - counts.x;
        int first_key = 0, first_page = 0;
        u64 rows = 0;
        // Tiles differ in length: one that is asked for early waits for a long one to end. Two blocks take longer than the counter's answer.
        const int ask = max(counts.y - 2, 0);
        u32 answer = 0;
        for (int e = 0, step = 0;; ++e) {
            if (e == ask) answer = plan.ask_for_tile();
            if (e == counts.y) break;
            if (e % 32 == 0 && e + lane < counts.y) {
                const int at = list_offset(counts, e + lane);
                first_key = block_key(p, plan, tile, at);
                rows = selected_by(p, plan, tile, at);
                first_page = page_of(p, tile.b, first_key);
            }
            const int first = __shfl_sync(ALL_LANES, first_key, e % 32);
            const u64 selected_by = __shfl_sync(ALL_LANES, rows, e % 32);
            int page = __shfl_sync(ALL_LANES, first_page, e % 32);
            const int visible = e < partial ? last_visible(p, tile, selected_by) : first + BLOCK;
            for (int key = first; key < first + BLOCK; key += KEYS, ++step, at.next()) {
                unsigned char *stage = stages + at.stage * STAGE_BYTES;
                const bool unseen = STEPS > 1 && key >= visible;  // nothing is loaded or computed
                const bool zeroes = !unseen && key + KEYS > visible;
                if (PAGE && key > first && in_page(key) == 0) page = key < visible ? page_of(p, tile.b, key) : -1;
                u64 *landed = zeroes ? &steps.raw : &steps.full[at.stage];
                steps.wait_empty(at);
                if (lane < CONSUMERS) {
                    const u64 own = IN_TURNS ? (step % CONSUMERS == lane ? selected_by : 0) : selected_by >> lane * TQ;
                    steps.rows[at.stage][lane] = unseen ? TokenBits{0} : static_cast<TokenBits>(own) & TOKEN_MASK;
                }
                if (lane == 0) {
                    steps.keys[at.stage] = key;
                    steps.visible[at.stage] = visible - key;
                }
                __syncwarp();
                if (unseen) steps.announce(at.stage);
                else if (lane == 0) {
                    mbarrier_arrive_expect(landed, STAGE_BYTES);
                    tma_load_key_tile<DK, ONCE>(stage, &k_map, landed, in_page(key), tile.g, page);
                    tma_load_key_tile<DV, ONCE>(stage + K_BYTES, &v_map, landed, in_page(key), tile.g, page);
                }
                if (zeroes) {
                    mbarrier_wait(landed, raw_parity);
                    raw_parity ^= 1;
                    zero_rows(stage, max(visible - key, 0));
                    fence_async_proxy();
                    __syncwarp();
                    steps.announce(at.stage);
                }
            }
        }
        coming = plan.tile_of(answer);
    }
}

// Producer warp: a consumer's rows of tensors [B,S,G,H,D], one after the other, once it no longer needs those of an earlier tile.
// COLUMNS: D of each tensor.
template <int... COLUMNS, int N, class... Maps>
DEVICE void produce_rows(Pipeline<N> &rows, const PipelineState<N> &at, unsigned char *to, const TokenTile &tile, int consumer,
                         const Maps &...maps) {
    rows.wait_empty(at);
    __syncwarp();  // all lanes have seen it: the next phase may pass
#ifdef ORDER_TOKENS  // a box a token
    const int lane = threadIdx.x % 32;
#else
    constexpr int lane = 0;
    if (threadIdx.x % 32) return;
#endif
    u64 *full = &rows.full[at.stage];
    if (lane == 0) mbarrier_arrive_expect(full, (COLUMNS + ...) / 64 * TQ * H * 128);
#ifdef ORDER_TOKENS
    __syncwarp();
    if (lane >= TQ) return;
#endif
    to += at.stage * (COLUMNS + ...) / 64 * PANEL + lane * H * 128;
    const int s = static_cast<int>(tile.token(consumer, lane));
    ((tma_load_row_tile<COLUMNS>(to, &maps, full, tile.g, s, tile.b), to += COLUMNS / 64 * PANEL), ...);
}

// A step of a tile, and which of the consumer's tokens selected it.
struct Step {
    int number, stage;
    TokenBits rows;
};

constexpr int NO_LIMIT = -1;
enum Found { STEP, LIMIT, END };

// The steps of a tile, as a consumer goes through them.
struct StepReader {
    StepPipeline &pipeline;
    const int consumer;
    const u32 stages;  // the first stage, an operand
    PipelineState<STAGES> at;  // of the next step
    int next, total;

    DEVICE StepReader(StepPipeline &steps, int number, const unsigned char *memory)
        : pipeline(steps), consumer(number), stages(uniform(operand(shared_address(memory)))) {}

    DEVICE void begin_tile(int steps) {
        next = 0;
        total = steps;
    }
    // The next step that a row of this consumer selected. The producer waits for stages to be released: a consumer that holds one must not
    // wait for step `limit`, which is to be loaded there.
    DEVICE Found find(Step &step, int limit) {
        while (next < total) {
            if (next == limit) return LIMIT;
            pipeline.wait_full(at);
            step = {next++, at.stage, pipeline.rows[at.stage][consumer]};
            at.next();
            if (step.rows) return STEP;
            __syncwarp();  // all lanes have read it
            release(step);
        }
        return END;
    }
    DEVICE u32 keys(const Step &step) const { return uniform(stages + step.stage * (STAGE_BYTES / 16)); }  // an operand
    DEVICE void release(const Step &step) { pipeline.release(step.stage); }
};

// A thread's two rows, (token, head) of the consumer's accumulator, 8 apart.
struct RowPair {
    TokenBits bit[2];  // of the token in Step::rows; 0: the row does not exist
#ifdef ORDER_TOKENS  // few steps have a mask, and registers are scarce
    const TokenTile &tile;
    const int consumer;
#else
    int limits[2];  // one past the last key that it may see
#endif
    const Problem &problem;
    DEVICE RowPair(const Problem &p, const TokenTile &of_tile, int of_consumer)
        :
#ifdef ORDER_TOKENS
          tile(of_tile), consumer(of_consumer),
#endif
          problem(p) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = row(r) / H;
            const i64 s = of_tile.token(of_consumer, token);
            const bool exists = token < TQ && s < p.S;
            bit[r] = exists ? TokenBits{1} << token : TokenBits{0};
#ifndef ORDER_TOKENS
            limits[r] = exists ? row_limit(p, of_tile.b, s) : 0;
#endif
        }
    }
    // One past the last key that a row may see.
    DEVICE int limit(int r) const {
#ifdef ORDER_TOKENS
        return bit[r] ? row_limit(problem, tile.b, tile.token(consumer, row(r) / H)) : 0;
#else
        return limits[r];
#endif
    }
    // `value` in place of elements for keys, counted from `first`, that a row does not see.
    template <class Tile>
    DEVICE void mask(Tile &s, int first, float value) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int end = limit(r);
#pragma unroll
            for (int i = 0; i < elements<Tile>; ++i)
                if (hidden(problem, first + column_of(i), end)) element(s, r, i) = value;
        }
    }
    static DEVICE int row(int r) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }
    // Among B*S*G*H.
    static DEVICE i64 index(const Problem &p, const TokenTile &tile, int consumer, int r) {
        return ((tile.b * p.S + tile.token(consumer, row(r) / H)) * p.G + tile.g) * H + row(r) % H;
    }
};

// A consumer's steps of a tile: the products of one step and the sums of the step before are in flight together, while the former's
// probabilities are computed. `math` has
//   begin_products(step)                s = q k^T, asynchronous
//   probabilities<PENDING>(step, key)   from s, in registers, while PENDING groups of wgmma that began later are in flight; `key`: the
//                                       first of the step if rows need a mask, else NO_MASK
//   finish_probabilities()              what the wait must not delay
//   update_operand()                    rounds them to an operand, once the sums of the step before are done
//   begin_sums(step)                    acc += operand * keys or values, asynchronous
//   BRIEF                               keys of a brief step, 0: there are none
//   brief_step<BRIEF>(step, key)        all of it for the first BRIEF keys of a step
constexpr int NO_MASK = -1;

// READS_Q: they read q in shared memory.
template <bool READS_Q = true, class Math>
DEVICE void consume_steps(StepReader &steps, int2 counts, Pipeline<Q_STAGES> &q, int q_stage, Math &math) {
    const int partial_steps = (counts.y - counts.x) * STEPS;
    Step coming;
    auto find = [&](int limit) {
        const Found found = steps.find(coming, limit);
        if (READS_Q && found == END) {
            __syncwarp();  // all lanes have seen q, of a tile without steps, too: the next phase may pass
            q.release(q_stage);  // is not read any more
        }
        return found;
    };
    Found found = find(NO_LIMIT);
    while (found == STEP) {
        Step held = coming;  // its sums are still to be added
        if constexpr (Math::BRIEF > 0)
            if (held.number < partial_steps && steps.pipeline.visible[held.stage] <= Math::BRIEF) {
                math.template brief_step<Math::BRIEF>(held, steps.pipeline.keys[held.stage]);
                steps.release(held);
                found = find(NO_LIMIT);
                continue;
            }
        wgmma_fence();
        math.begin_products(held);
        math.template probabilities<0>(held, held.number < partial_steps ? steps.pipeline.keys[held.stage] : NO_MASK);
        math.update_operand();
        while ((found = find(held.number + STAGES)) == STEP && coming.number >= partial_steps) {
            wgmma_fence();
            math.begin_products(coming);
            math.begin_sums(held);
            math.template probabilities<1>(coming, NO_MASK);
            math.finish_probabilities();
            wgmma_wait<0>();
            steps.release(held);
            math.update_operand();
            held = coming;
        }
        wgmma_fence();
        math.begin_sums(held);
        wgmma_wait<0>();
        steps.release(held);
        if (found == LIMIT) found = find(NO_LIMIT);
    }
}

// Columns of an accumulator from `first` on, scaled and rounded, to [B,S,G,H,COLUMNS], straight from registers. Rows with scale 0 get zeros: a row that
// selected nothing has met every step with p = 0, and NaN or infinity in its own q or do makes that NaN.
template <int COLUMNS, int N>
DEVICE void write_rows(const float (&acc)[N], const float (&scale)[2], u16 *to, const Problem &p, const TokenTile &tile, int consumer,
                       int first = 0) {
    const RowPair rows(p, tile, consumer);  // computed again: registers are scarce
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u16 *row = to + RowPair::index(p, tile, consumer, r) * COLUMNS + first + threadIdx.x % 4 * 8;
#pragma unroll
        for (int j = 0; j < N / 4; j += 4) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[i] = scale[r] == 0.0f ? 0 : pack(acc[4 * (j + i) + 2 * r] * scale[r], acc[4 * (j + i) + 2 * r + 1] * scale[r]);
            quad_transpose(x);
            if (rows.bit[r]) *reinterpret_cast<uint4 *>(row + 8 * j) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}
