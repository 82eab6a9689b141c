// Persistent, warp-specialized kernels over tiles of tokens on Hopper: forward_tiles.cu, dq_tiles.cu and, with steps of
// their own (gather_steps.cuh), forward_gather.cu and dq_gather.cu.
//
// Grid: at most one CTA per multiprocessor; CTAs pull tiles from an atomic counter, because tiles differ in length.
//   FEW_TOKENS: one CTA per tile, two per multiprocessor.
// Tile: TOKENS = CONSUMERS * TQ tokens of one (b, g), adjacent or in the order of ordered_union.cu. Each consumer
//   warpgroup owns a 64-row accumulator: TQ = 64 / H tokens times H heads.
// Producer warpgroup: warp 0 loads K and V of the union of the tile's blocks (tile_plan.cuh) through TMA, once for all
//   consumers, KEYS keys per step, through STAGES stages. Warp 1 + i loads q (and do) of consumer i, one tile ahead.
// Steps: consumers compute the steps that one of their tokens selected. Rows that did not select the step's block are
//   masked by shifting their logits to -inf, at no per-element cost.
// Pages: hold whole steps. A step whose keys no row sees may have page -1, for which TMA loads zeros.
// Masks: the partial blocks, which the causal clamp, a window or the end of the cache cuts for some row, come first.
//   They take a per-element mask, and keys that no row sees are zeroed in shared memory, because 0 * NaN is NaN. Every
//   row sees the other blocks up to their last key: no mask.
// One head: the consumers own the same 64 tokens and alternate steps (IN_TURNS): the union of 128 tokens is longer.
//
//   H, CONSUMERS      heads per group (1 to 64), consumer warpgroups
//   STAGES, Q_STAGES  stages of K and V; stages of a consumer's q (2: the next tile's q is loaded during this tile)
//   BLOCK             keys per block, a multiple of 64
#pragma once
#include "tile_plan.cuh"
#include "hopper_tiles.cuh"

constexpr int KEYS = 64, STEPS = BLOCK / KEYS;  // keys per step, steps per block
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES, Q_BYTES = K_BYTES;  // of a consumer: q
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int PER_SM = CONSUMERS == 1 ? 2 : 1;                                                                // CTAs
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 152 : CONSUMERS == 2 ? 224 : 200, PRODUCER_REGISTERS = 56;  // a thread
constexpr bool ONCE = FEW_TOKENS;  // only one CTA reads each K and V tile

// Queue of the CTA's tiles: the producer of K and V publishes them to all other warps.
struct TileQueue {
    static constexpr int AHEAD = 2;
    Pipeline<AHEAD> pipeline;
    u32 number[AHEAD];
    int2 counts[AHEAD];
    // ORDERED: in use until a warp takes its next tile. The last element is read but not used if H does not divide 64.
    unsigned char tokens[ORDERED ? AHEAD + 1 : 1][ORDERED ? TOKENS + 1 : 1];
};

// A warp's position in the queue, and the tile there.
struct TileScheduler {
    TileQueue &queue;
    const TilePlan &plan;
    int taken = 0;
    u32 number;   // the tile
    int2 counts;  // its number of whole blocks, of all blocks

    DEVICE PipelineState<TileQueue::AHEAD> state() const { return {taken % TileQueue::AHEAD, taken / TileQueue::AHEAD % 2}; }
    // The state of a pipeline that uses one stage per tile.
    template <int N> DEVICE PipelineState<N> at() const { return {(taken - 1) % N, (taken - 1) / N % 2}; }
    DEVICE TokenTile tile(u32 G) const {
        TokenTile tile(number, plan, G);
        if (ORDERED) tile.tokens = queue.tokens[at<TileQueue::AHEAD + 1>().stage];
        return tile;
    }

    // The K/V producer: publish a tile number, including the one past the last; return whether it is a tile.
    DEVICE bool publish(u32 tile, const Problem &p) {
        const auto at = state();
        number = tile;
        counts = number < plan.all_tiles ? Union::block_counts(p, plan, TokenTile(number, plan, p.G)) : make_int2(0, 0);
        queue.pipeline.wait_empty(at);
        if (ORDERED && number < plan.all_tiles) {
            const TokenTile tile(number, plan, p.G);
            const unsigned char *order = tile.order(plan, p.G);
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < TOKENS; i += 32) queue.tokens[taken % (TileQueue::AHEAD + 1)][i] = order[i];
        }
        __syncwarp();  // all lanes have passed the wait, so the barrier may enter its next phase
        if (threadIdx.x % 32 == 0) {
            queue.number[at.stage] = number;
            queue.counts[at.stage] = counts;
            mbarrier_arrive(&queue.pipeline.full[at.stage]);
        }
        ++taken;
        return number < plan.all_tiles;
    }
    // All other warps: wait for the next tile; return false past the last.
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

// Pipeline of steps: K and V in shared memory, and the tokens that selected them.
struct StepPipeline : Pipeline<STAGES> {
    u64 raw;                            // mbarrier of K and V that must be partly zeroed before consumers read them
    TokenBits rows[STAGES][CONSUMERS];  // bit r: token r of the consumer selected the step's block
    int keys[STAGES];                   // first key of the step
    int visible[STAGES];                // upper bound on the step's keys that some row sees
};

struct Shared {
    StepPipeline steps;
    TileQueue tiles;
    Pipeline<Q_STAGES> q[CONSUMERS];
    Pipeline<1> gradients[CONSUMERS];  // do (and o), of dq_tiles.cu

    DEVICE void init() {
        steps.init(1, 4 * CONSUMERS);           // one lane of every consumer warp arrives
        tiles.pipeline.init(1, 5 * CONSUMERS);  // likewise, and one lane of the warps that load rows
        for (int i = 0; i < CONSUMERS; ++i) {
            q[i].init(1, 4);
            gradients[i].init(1, 4);
        }
        mbarrier_init(&steps.raw, 1);
        mbarrier_fence_init();
    }
};

// Return one past the last key that any of the tile's tokens in `rows` may see.
DEVICE int last_visible(const Problem &p, const TokenTile &tile, u64 rows) {
    int last = 0;
    for (int r = threadIdx.x % 32; r < TOKENS; r += 32)
        if (rows >> r & 1) last = max(last, row_limit(p, tile.b, tile.token(0, r)));
    return __reduce_max_sync(ALL_LANES, last);
}

// Zero a step's keys and values from row `first` on. Rows are zeroed whole, so the swizzle does not matter.
DEVICE void zero_rows(unsigned char *stage, int first) {
#pragma unroll 1
    for (int panel = 0; panel < STAGE_BYTES / PANEL; ++panel)
        for (int i = first * 8 + threadIdx.x % 32; i < KEYS * 8; i += 32)
            *reinterpret_cast<uint4 *>(stage + panel * PANEL + i * 16) = make_uint4(0, 0, 0, 0);
}

// Producer warp: fetch the CTA's tiles and load K and V of their steps.
template <class Arguments> DEVICE void produce_steps(const Arguments &x, unsigned char *stages, Shared &shared) {
    const Problem &p = x.p;
    const TilePlan &plan = x.plan;
    StepPipeline &steps = shared.steps;
    const int lane = threadIdx.x % 32;
    int raw_parity = 0;
    PipelineState<STAGES> at;
    TileScheduler scheduler{shared.tiles, plan};
    for (u32 coming = blockIdx.x; scheduler.publish(coming, p);) {
        const TokenTile tile = scheduler.tile(p.G);
        const int2 counts = scheduler.counts;
        const int partial = counts.y - counts.x;
        int first_key = 0, first_page = 0;
        u64 rows = 0;
        // Ask only two blocks before the end, enough to hide the atomic's latency, so that a slow CTA does not reserve a
        // tile early.
        const int ask = max(counts.y - 2, 0);
        u32 answer = 0;
        for (int e = 0, step = 0;; ++e) {
            if (e == ask) answer = plan.ask_for_tile();
            if (e == counts.y) break;
            if (e % 32 == 0 && e + lane < counts.y) {
                const int at = list_offset(counts, e + lane);
                first_key = Union::block_key(p, plan, tile, at);
                rows = Union::selected_by(p, plan, tile, at);
                first_page = page_of(p, tile.b, first_key);
            }
            const int first = __shfl_sync(ALL_LANES, first_key, e % 32);
            const u64 selected_by = __shfl_sync(ALL_LANES, rows, e % 32);
            int page = __shfl_sync(ALL_LANES, first_page, e % 32);
            const int visible = e < partial ? last_visible(p, tile, selected_by) : first + BLOCK;
            for (int key = first; key < first + BLOCK; key += KEYS, ++step, at.next()) {
                unsigned char *stage = stages + at.stage * STAGE_BYTES;
                const bool unseen = STEPS > 1 && key >= visible;  // no row sees the step: skip its loads and products
                const bool zeroes = !unseen && key + KEYS > visible;
                if (PAGED && key > first && in_page(key) == 0) page = key < visible ? page_of(p, tile.b, key) : -1;
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
                    tma_load_key_tile<DK, ONCE>(stage, &x.k, landed, in_page(key), tile.g, page);
                    tma_load_key_tile<DV, ONCE>(stage + K_BYTES, &x.v, landed, in_page(key), tile.g, page);
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

// Producer warp: load a consumer's rows of tensors [B,S,G,H,COLUMNS] once it has released those of the tile before.
template <int... COLUMNS, int N, class... Maps>
DEVICE void produce_rows(Pipeline<N> &rows, const PipelineState<N> &at, unsigned char *to, const TokenTile &tile, int consumer,
                         const Maps &...maps) {
    rows.wait_empty(at);
    __syncwarp();  // all lanes have passed the wait, so the barrier may enter its next phase
    const int lane = ORDERED ? threadIdx.x % 32 : 0;  // ORDERED: one TMA box per token
    if (!ORDERED && threadIdx.x % 32) return;
    u64 *full = &rows.full[at.stage];
    if (lane == 0) mbarrier_arrive_expect(full, (COLUMNS + ...) / 64 * TQ * H * 128);
    if (ORDERED) {
        __syncwarp();
        if (lane >= TQ) return;
    }
    to += at.stage * (COLUMNS + ...) / 64 * PANEL + lane * H * 128;
    const int s = static_cast<int>(tile.token(consumer, lane));
    ((tma_load_row_tile<COLUMNS>(to, &maps, full, tile.g, s, tile.b), to += COLUMNS / 64 * PANEL), ...);
}

constexpr int NO_MASK = -1, NO_STAGE = -1;

// A step of a tile, and the consumer's tokens that selected it.
struct Step {
    int stage;
    TokenBits rows;
};

// A consumer's position in the steps of its tile.
struct StepReader {
    typedef ::Step Step;
    DEVICE static int steps_of(int blocks) { return blocks * STEPS; }
    StepPipeline &pipeline;
    const int consumer;
    const u32 stages;  // wgmma operand of the first stage
    PipelineState<STAGES> at = {};  // pipeline state of the next step
    int left = 0;  // steps of the tile after the one found last

    DEVICE void begin_tile(int steps) { left = steps; }
    // Return the first key of the step found last if its rows need a mask, else NO_MASK. whole: steps, the last ones,
    // that need none.
    DEVICE int masked_key(const Step &step, int whole) const { return left >= whole ? pipeline.keys[step.stage] : NO_MASK; }
    // Find the next step that a row of this consumer selected; return whether there is one. A consumer that holds stage
    // `held` must not wait for a step that the producer loads into it.
    DEVICE bool find(Step &step, int held = NO_STAGE) {
        while (left > 0 && at.stage != held) {
            pipeline.wait_full(at);
            step = {at.stage, pipeline.rows[at.stage][consumer]};
            --left;
            at.next();
            if (step.rows) return true;
            __syncwarp();  // all lanes have read `rows`
            release(step);
        }
        return false;
    }
    DEVICE static int last_stage(const Step &step) { return step.stage; }  // that a consumer releases
    DEVICE u32 keys(const Step &step) const { return uniform(stages + step.stage * (STAGE_BYTES / 16)); }  // operand
    DEVICE void release(const Step &step) { pipeline.release(step.stage); }
};

// One past the last key that each of a thread's rows may see: stored, or (ORDERED) recomputed, to save registers.
struct StoredLimits {
    int limits[2];
    DEVICE StoredLimits(const TokenTile &, int) {}
    DEVICE void store(int r, int limit) { limits[r] = limit; }
    DEVICE int limit_of(const Problem &, int r, int, bool) const { return limits[r]; }
};
struct RecomputedLimits {
    const TokenTile &tile;
    const int consumer;
    DEVICE RecomputedLimits(const TokenTile &of_tile, int of_consumer) : tile(of_tile), consumer(of_consumer) {}
    DEVICE void store(int, int) {}
    DEVICE int limit_of(const Problem &p, int, int token, bool exists) const {
        return exists ? row_limit(p, tile.b, tile.token(consumer, token)) : 0;
    }
};

// A thread's two rows of the consumer's accumulator, 8 apart; a row is a (token, head) pair.
struct RowPair : If<ORDERED, RecomputedLimits, StoredLimits> {
    TokenBits bit[2];  // the token's bit in Step::rows; 0 if the row does not exist
    const Problem &problem;
    DEVICE RowPair(const Problem &p, const TokenTile &tile, int consumer)
        : If<ORDERED, RecomputedLimits, StoredLimits>(tile, consumer), problem(p) {
        UNROLL for (int r = 0; r < 2; ++r) {
            const int token = row(r) / H;
            const i64 s = tile.token(consumer, token);
            const bool exists = token < TQ && s < p.S;
            bit[r] = exists ? TokenBits{1} << token : TokenBits{0};
            if (!ORDERED) this->store(r, exists ? row_limit(p, tile.b, s) : 0);
        }
    }
    DEVICE int limit(int r) const { return limit_of(problem, r, row(r) / H, bit[r]); }
    // Overwrite elements of keys that a row does not see with `value`. first: the key of column 0.
    template <class Tile> DEVICE void mask(Tile &s, int first, float value) const {
        UNROLL for (int r = 0; r < 2; ++r) {
            const int end = limit(r);
            UNROLL for (int i = 0; i < elements<Tile>; ++i)
                if (hidden(problem, first + column_of(i), end)) element(s, r, i) = value;
        }
    }
    static DEVICE int row(int r) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }
    // The row's index in [B,S,G,H].
    static DEVICE i64 index(const Problem &p, const TokenTile &tile, int consumer, int r) {
        return ((tile.b * p.S + tile.token(consumer, row(r) / H)) * p.G + tile.g) * H + row(r) % H;
    }
};

// Run a consumer through the steps of a tile. Software pipeline: the first GEMM of one step and the second GEMM of the
// step before are in flight together, while the probabilities of the former are computed. `steps` is a StepReader or a
// GatherReader. `math` provides
//   begin_products(step)                start s = q k^T, asynchronous
//   probabilities<PENDING>(step, key)   turn s into p, in registers, while PENDING later wgmma groups are in flight;
//                                       `key`: the step's first key if rows need a mask, else NO_MASK
//   finish_probabilities()              work that must come before the wait
//   fails()                             return whether p is too large: the step is repeated, with probabilities<0>
//   update_operand()                    round p to an operand, once the second GEMM of the step before is done
//   begin_sums(step)                    start acc += operand * keys or values, asynchronous
//   BRIEF                               keys of a brief step, 0 if there are none
//   brief_step<BRIEF>(step, key)        do all of the above for the first BRIEF keys of a step
// READS_Q: the products read q from shared memory, so q is released after the last step.
template <bool READS_Q = true, class Reader, class Rows, class Math>
DEVICE void consume_steps(Reader &steps, int whole_steps, Rows &q, int q_stage, Math &math) {
    typename Reader::Step coming;
    bool more = steps.find(coming);
    while (more) {
        auto held = coming;  // its second GEMM has not started
        if constexpr (Math::BRIEF > 0)
            if (steps.left >= whole_steps && steps.pipeline.visible[held.stage] <= Math::BRIEF) {
                math.template brief_step<Math::BRIEF>(held, steps.pipeline.keys[held.stage]);
                steps.release(held);
                more = steps.find(coming);
                continue;
            }
        wgmma_fence();
        math.begin_products(held);
        math.template probabilities<0>(held, steps.masked_key(held, whole_steps));
        math.update_operand();
        bool fails = false;
        while ((more = steps.find(coming, Reader::last_stage(held))) && steps.left < whole_steps) {
            wgmma_fence();
            math.begin_products(coming);
            math.begin_sums(held);
            math.template probabilities<1>(coming, NO_MASK);
            math.finish_probabilities();
            wgmma_wait<0>();
            steps.release(held);
            fails = math.fails();
            if (fails) break;
            math.update_operand();
            held = coming;
        }
        if (fails) continue;
        wgmma_fence();
        math.begin_sums(held);
        wgmma_wait<0>();
        steps.release(held);
        if (!more) more = steps.find(coming);
    }
    if (!READS_Q) return;
    __syncwarp();  // all lanes have waited for q, even without steps, so the barrier may enter its next phase
    q.release(q_stage);
}

// Store an accumulator, scaled and rounded, to columns of [B,S,G,H,COLUMNS] from `first` on. Rows with scale 0 get
// zeros: their accumulator is NaN if their q or do is.
template <int COLUMNS, int N>
DEVICE void write_rows(const float (&acc)[N], const float (&scale)[2], u16 *to, const Problem &p, const TokenTile &tile, int consumer,
                       int first = 0) {
    const RowPair rows(p, tile, consumer);  // recomputed, because registers are scarce
    UNROLL for (int r = 0; r < 2; ++r) {
        u16 *row = to + RowPair::index(p, tile, consumer, r) * COLUMNS + first + threadIdx.x % 4 * 8;
        UNROLL for (int j = 0; j < N / 4; j += 4) {
            u32 x[4];
            UNROLL for (int i = 0; i < 4; ++i)
                x[i] = scale[r] == 0.0f ? 0 : pack(acc[4 * (j + i) + 2 * r] * scale[r], acc[4 * (j + i) + 2 * r + 1] * scale[r]);
            quad_transpose(x);
            if (rows.bit[r]) *reinterpret_cast<uint4 *>(row + 8 * j) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

constexpr float SLACK = 8.0f;

struct ForwardArguments {
    TensorMap q, k, v;
    Problem p;
    TilePlan plan;
    u16 *o;      // [B,S,G,h,DV]
    float *lse;  // [B,S,G,h]
};

// One consumer's attention over a tile, of forward_tiles.cu and forward_gather.cu:
//   s = q k^T,  p = 2^(c (s - m)),  o = sum_j p_j v_j / l,  lse = c m + log2 l         (softmax.cuh)
// The running maximum m is lazy: it rises only if c (s - m) exceeds SLACK, so that most steps need no reduction over
// lanes and do not rescale acc. p stays below 2^SLACK (forward_tiles.cu: 2^12), and o = acc / l does not depend on m.
template <class Reader> struct Attention {
    Reader &steps;
    const u32 q_tile;  // wgmma operand in shared memory
    const RowPair &rows;
    const float slack;  // SLACK / c
    OnlineSoftmax softmax;
    float acc[DV / 2], s[KEYS / 2], alpha[2] = {1.0f, 1.0f};  // s: [2, KEYS / 4], acc: [2, DV / 4], for a thread's two rows
    u32 p[KEYS / 16][4];  // wgmma operand in registers
    bool rises = false;   // a maximum rises in this step

    DEVICE Attention(Reader &steps, u32 q, const RowPair &pair, float c, float slack)
        : steps(steps), q_tile(q), rows(pair), slack(slack), softmax(c) {
        UNROLL for (int i = 0; i < DV / 2; ++i) acc[i] = 0.0f;
    }
    // Replace logits by p, and compute alpha if a maximum rises. takes_part(r): row r selected some of the step's keys.
    template <class Tile, class Row> DEVICE void exponentiate(Tile &s, Row takes_part) {
        float top[2];  // even of a row that does not take part, so that nothing branches
        bool higher = false;
        UNROLL for (int r = 0; r < 2; ++r) {
            top[r] = row_max(s, r);
            higher |= top[r] > (takes_part(r) ? softmax.m[r] + slack : infinity());
        }
        rises = __any_sync(ALL_LANES, higher);
        if (rises) {
            UNROLL for (int r = 0; r < 2; ++r) alpha[r] = softmax.raise(r, quad_max(takes_part(r) ? top[r] : LOWEST));
        }
        UNROLL for (int r = 0; r < 2; ++r) softmax.exponentiate(s, r, takes_part(r));
    }
    DEVICE void compute_sums_before_wait(void *nowhere) {
        compute_before_wait(softmax.l[0] + softmax.l[1], nowhere);
    }
    DEVICE void update_operand() {
        if (rises) scale_rows(acc, alpha);
        as_operand(p, s);
    }
    DEVICE void write(const ForwardArguments &x, const TokenTile &tile, int consumer) {
        float scale[2];
        UNROLL for (int r = 0; r < 2; ++r) {
            const RowTotals totals(softmax.c, softmax.m[r], quad_sum(softmax.l[r]));
            scale[r] = totals.scale;
            if (rows.bit[r] && threadIdx.x % 4 == 0) x.lse[RowPair::index(x.p, tile, consumer, r)] = totals.lse * LN_2;
        }
        write_rows<DV>(acc, scale, x.o, x.p, tile, consumer);
    }
};

// Consumer warpgroup: attend to the tiles of this CTA, and store o and lse by finish(attention, tile).
template <class Math, class Reader, class Shared, class Finish>
DEVICE void attend_tiles(const ForwardArguments &x, Reader steps, unsigned char *q_memory, Shared &shared, int consumer, Finish finish) {
    const u32 q_tile = uniform(operand(shared_address(q_memory)));
    const float c = x.p.scale_log2, slack = SLACK / c;
    TileScheduler scheduler{shared.tiles, x.plan};
    while (scheduler.next_tile()) {
        const TokenTile tile = scheduler.tile(x.p.G);
        const RowPair rows(x.p, tile, consumer);
        Math attention(steps, q_tile, rows, c, slack);
        steps.begin_tile(Reader::steps_of(scheduler.counts.y));
        shared.q[consumer].wait_full(scheduler.at<1>());
        if constexpr (Math::HOLDS_Q) {
            attention.load_q(q_memory);
            __syncwarp();  // all lanes have read q
            shared.q[consumer].release(0);
        }
        consume_steps<!Math::HOLDS_Q>(steps, steps.left - Reader::steps_of(scheduler.counts.y - scheduler.counts.x), shared.q[consumer], 0, attention);
        finish(attention, tile);
    }
}

// The gradient of q, of dq_tiles.cu and dq_gather.cu.
struct QueryGradients {
    const u16 *o;             // [B,S,G,h,DV], contiguous
    const float *lse, *dlse;  // [B,S,G,h]; dlse may be null
    u16 *dq;                  // [B,S,G,h,DK]
    float *delta;             // [B,S,G,h]
};

// One consumer's gradient over a tile:
//   delta = sum(do * o) - dlse,  p = 2^(c q k^T - lse),  ds = p * (do v^T - delta),  dq = scale * sum_j ds_j k_j
template <class Reader> struct Gradient {
    Reader &steps;
    const u32 q_tile;  // wgmma operand in shared memory
    static constexpr int BRIEF = 0;  // docs/kernels.md, "Tried and dropped"
    const RowPair &rows;
    const float c;
    float delta[2], lse[2];  // lse in base 2; infinity for a row without keys, so that p = 0
    float acc[DK / 2], s[KEYS / 2], dp[KEYS / 2];  // acc: [2, DK / 4], s and dp: [2, KEYS / 4], for a thread's two rows
    u32 ds[KEYS / 16][4];  // an operand

    DEVICE Gradient(Reader &steps, u32 q, const RowPair &pair, float c) : steps(steps), q_tile(q), rows(pair), c(c) {}
    template <class Arguments> DEVICE void load_lse(const Arguments &x, const TokenTile &tile, int consumer) {
        UNROLL for (int r = 0; r < 2; ++r) lse[r] = rows.bit[r] ? x.to.lse[RowPair::index(x.p, tile, consumer, r)] : -infinity();
    }
    // Compute and store delta, and clear acc. sum: this thread's part of do * o.
    template <class Arguments>
    DEVICE void begin(const Arguments &x, const TokenTile &tile, int consumer, const float (&sum)[2]) {
        UNROLL for (int r = 0; r < 2; ++r) {
            const i64 row = RowPair::index(x.p, tile, consumer, r);
            delta[r] = quad_sum(sum[r]);
            if (x.to.dlse && rows.bit[r]) delta[r] -= x.to.dlse[row];
            if (rows.bit[r] && threadIdx.x % 4 == 0) x.to.delta[row] = delta[r];
        }
        UNROLL for (int i = 0; i < DK / 2; ++i) acc[i] = 0.0f;
    }
    DEVICE void to_base_2() {
        UNROLL for (int r = 0; r < 2; ++r) lse[r] = lse[r] == -infinity() ? infinity() : lse[r] * LOG2_E;
    }
    DEVICE void finish_probabilities() {}
    DEVICE bool fails() const { return false; }
    DEVICE void update_operand() { as_operand(ds, s); }
    template <class Arguments> DEVICE void write(const Arguments &x, const TokenTile &tile, int consumer) {
        float scale[2];
        UNROLL for (int r = 0; r < 2; ++r) scale[r] = lse[r] == infinity() ? 0.0f : static_cast<float>(x.p.scale);
        write_rows<DK>(acc, scale, x.to.dq, x.p, tile, consumer);
    }
};

// The warpgroups of a CTA: consume(number) runs in each consumer, produce(number) in each warp of the producer.
template <class Consume, class Produce> DEVICE void run_warpgroups(Consume consume, Produce produce) {
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup < CONSUMERS) {
        reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PER_SM>(true);
        consume(warpgroup);
    } else {
        reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PER_SM>(false);
        produce(threadIdx.x / 32 - 4 * CONSUMERS);
    }
}
