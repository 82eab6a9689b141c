// Forward pass on Hopper for few new tokens per sequence over an e4m3 cache: a tile of tokens loads the union of their
// blocks once.
//
//   s = q k^T,  p = 2^(c (s - m)),  o = sum_j p_j v_j / l,  lse = c m + log2 l         (softmax.cuh)
//
// Grid: one CTA per (b, g) and TOKENS tokens. The CTA builds the union itself (few_tokens.cuh).
// Rows: TOKENS tokens times H heads, at most 16: operand A of the tensor core. Rows without a token have q = 0.
// Warps: a producer warp loads K and V through TMA; four consumer warps share a step as in forward_blocks.cu.
// Masks: logits are -inf unless the row's token selected the block and sees the key. Values that no token sees are
//   zeroed, because 0 * NaN is NaN.
//
//   H, TOKENS           heads per group; tokens per tile
//   STAGES, PER_SM      stages of K and V; CTAs per multiprocessor
//   BLOCK, PAGE_SCALES  keys per block, a multiple of KEYS; see stored_tiles.cuh
#include "stored_tiles.cuh"
#include "few_tokens.cuh"

struct Arguments {
    TensorMap k, v;
    Problem p;
    u16 *o;      // [B,S,G,H,DV]
    float *lse;  // [B,S,G,H]
    i64 tiles;   // per (b, g)
    KeyValueScales scales;
};

constexpr int KEYS = 64, SHARES = 4, CONSUMERS = 32 * SHARES, ROWS = 16;  // a consumer warp for each share of keys and columns
constexpr int THREADS = CONSUMERS + 32 < MOST_ENTRIES ? MOST_ENTRIES : CONSUMERS + 32;  // a thread for each entry of the union
constexpr int SHARE = KEYS / SHARES, COLUMNS = DV / SHARES, PP = KEYS + 8;
constexpr int K_BYTES = KEYS * DK, V_BYTES = KEYS * DV, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr u32 PER_BLOCK = BLOCK / KEYS;  // steps
constexpr int NO_KEY = -1;
static_assert(TOKENS * H <= ROWS, "a row for each token and head");

struct Shared {
    Pipeline<STAGES> steps;
    int keys[STAGES];    // first key of a step; NO_KEY: no more steps
    u32 tokens[STAGES];  // tokens that selected its block
    int limits[STAGES];  // one past the last key that any of these tokens sees
    float k_scales[STAGES], v_scales[STAGES];
    float tops[SHARES][ROWS], sums[SHARES][ROWS];
};

// Tokens [first, first + count) of sequence b and group g.
struct Tile {
    const Problem &p;
    u32 b, g;
    int first, count;
    DEVICE Tile(const Arguments &x)
        : p(x.p), b(blockIdx.x / static_cast<u32>(x.tiles) / static_cast<u32>(x.p.G)),
          g(blockIdx.x / static_cast<u32>(x.tiles) % static_cast<u32>(x.p.G)), first(blockIdx.x % static_cast<u32>(x.tiles) * TOKENS),
          count(min(TOKENS, static_cast<int>(x.p.S) - first)) {}

    DEVICE int limit(int token) const { return row_limit(p, b, first + token); }
    // Return one past the last key that any of these tokens (bits) sees; tokens may have any positions.
    DEVICE int last_limit(u32 tokens) const {
        int last = 0;
        for (int token = 0; token < count; ++token)
            if (tokens >> token & 1) last = max(last, limit(token));
        return last;
    }
};

// Producer warp: load all steps of the union. Lanes read the pages of 32 steps at once.
DEVICE void produce_steps(const Arguments &x, const Tile &tile, unsigned char *stages, Shared &shared) {
    const int lane = threadIdx.x % 32;
    const u32 all_tokens = (1u << TOKEN_BITS) - 1;
    const u32 steps = static_cast<u32>(union_counts.y) * PER_BLOCK;
    PipelineState<STAGES> at;
    for (u32 first = 0; first < steps; first += 32) {
        const u32 step = first + lane, entry = step < steps ? union_entries[step / PER_BLOCK] : 0;
        const int key = static_cast<int>((entry >> TOKEN_BITS) * BLOCK + step % PER_BLOCK * KEYS);
        const int limit = tile.last_limit(entry & all_tokens);  // of the tokens that selected the block
        const bool exists = step < steps && key < limit;
        const int page = exists ? page_of(x.p, tile.b, key) : 0;
        for (u32 left = __ballot_sync(ALL_LANES, exists); left; left &= left - 1, at.next()) {
            shared.steps.wait_empty(at);
            __syncwarp();  // all lanes have passed the wait, so the barrier may enter its next phase
            if (lane == __ffs(left) - 1) {
                unsigned char *k_tile = stages + at.stage * STAGE_BYTES;
                u64 *full = &shared.steps.full[at.stage];
                shared.keys[at.stage] = key;
                shared.tokens[at.stage] = entry & all_tokens;
                shared.limits[at.stage] = limit;
                mbarrier_arrive_expect(full, STAGE_BYTES);
                tma_load_key_tile<DK, false, K_BOX>(k_tile, &x.k, full, in_page(key), tile.g, page);
                tma_load_key_tile<DV, false, V_BOX>(k_tile + K_BYTES, &x.v, full, in_page(key), tile.g, page);
                if (PAGE_SCALES) {
                    x.scales.k.load(&shared.k_scales[at.stage], full, page, tile.g);
                    x.scales.v.load(&shared.v_scales[at.stage], full, page, tile.g);
                }
            }
            __syncwarp();
        }
    }
    shared.steps.wait_empty(at);
    if (lane == 0) {
        shared.keys[at.stage] = NO_KEY;
        for (int arrivals = 0; arrivals <= 2 * PAGE_SCALES; ++arrivals) mbarrier_arrive(&shared.steps.full[at.stage]);
    }
}

// A consumer warp: its share of keys and columns.
struct Consumer {
    const Arguments &x;
    const Tile &tile;
    Shared &shared;
    u16 *const q_tile, *const p_tile;
    const int lane, share;
    const float slack;
    OnlineSoftmax softmax;
    u32 q[DK / 16][4];  // operand A
    float acc[COLUMNS / 8][4] = {};
    float k_rate[2], v_rate;  // factors of a row's products and of its o
    int limits[2];            // limits of the lane's two rows, 0 without a token
    u32 own[2];               // bits of their tokens

    DEVICE Consumer(const Arguments &x, const Tile &tile, Shared &shared, u16 *q_tile, u16 *p_tile)
        : x(x), tile(tile), shared(shared), q_tile(q_tile), p_tile(p_tile), lane(threadIdx.x % 32), share(threadIdx.x / 32),
          slack(SLACK / static_cast<float>(x.p.scale_log2)), softmax(x.p.scale_log2) {
        UNROLL for (int r = 0; r < 2; ++r) {
            limits[r] = exists(r) ? tile.limit(row(r) / H) : 0;
            own[r] = 1u << row(r) / H;
        }
    }

    DEVICE int row(int r) const { return lane / 4 + 8 * r; }  // of a lane's two rows
    DEVICE bool exists(int r) const { return row(r) < tile.count * H; }

    DEVICE void load_q() {
        const HeadsTensor &from = x.p.q;
        k_rate[0] = k_rate[1] = PAGE_SCALES ? 1.0f : x.scales.k.of_head(tile.g);
        v_rate = PAGE_SCALES ? 1.0f : x.scales.v.of_head(tile.g);
        copy_rows<DK, KP, ROWS, CONSUMERS>(q_tile, from.heads(tile.b, tile.first, tile.g), [&](int r) {
            return RowSource{r / H * from.stride_s + r % H * from.stride_h, r < tile.count * H};
        });
        cp_async_commit();
        cp_async_wait<0>();
        float *rates = reinterpret_cast<float *>(p_tile);  // there is no p before the first step has passed a barrier
        Stored::convert_queries<ROWS, CONSUMERS>(q_tile, rates);
        named_barrier<CONSUMERS>(1);  // q is loaded
        Stored::load_queries(q, q_tile, 0);
        UNROLL for (int r = 0; BF16 && r < 2; ++r) k_rate[r] *= rates[row(r)];
    }

    // Compute the logits of this share's keys, -inf for keys that a row does not see.
    DEVICE void add_logits(float (&s)[SHARE / 8][4], const unsigned char *keys, int stage, const int (&seen)[2]) const {
        Stored::add_q_kt(s, q, keys, share * SHARE);
        const float scale = PAGE_SCALES ? shared.k_scales[stage] : 1.0f;
        scale_rows(s, {k_rate[0] * scale, k_rate[1] * scale});
        if (min(seen[0], seen[1]) < KEYS) mask_columns(s, share * SHARE, seen, -infinity());
    }

    DEVICE void step(unsigned char *k_tile, int stage) {
        unsigned char *v_tile = k_tile + K_BYTES;
        const int key = shared.keys[stage];
        int seen[2];
        UNROLL for (int r = 0; r < 2; ++r) seen[r] = shared.tokens[stage] & own[r] ? limits[r] - key : 0;
        float s[SHARE / 8][4] = {};
        add_logits(s, k_tile, stage, seen);
        if (shared.limits[stage] - key < KEYS) zero_values<SHARE>(v_tile, share * SHARE, shared.limits[stage] - key);
        const float top[2] = {row_max(s, 0), row_max(s, 1)};
        const bool rises = top[0] > softmax.m[0] + slack || top[1] > softmax.m[1] + slack;
        if (named_barrier_any<CONSUMERS>(1, rises))  // also: all have read the previous p
            raise_maxima<CONSUMERS>(softmax, acc, top, shared.tops, share, row(0));
        store_p<PP>(softmax, s, p_tile, row(0), share * SHARE);
        named_barrier<CONSUMERS>(1);  // p is stored, and hidden values are zeroed
        const Stored::Values<KEYS, COLUMNS / 8> values(v_tile, share * COLUMNS);
        Stored::add_p_v<PP, KEYS>(acc, p_tile, 0, values, PAGE_SCALES ? shared.v_scales[stage] : 1.0f);
    }

    DEVICE void attend(unsigned char *stages) {
        for (PipelineState<STAGES> at;; at.next()) {
            shared.steps.wait_full(at);
            if (shared.keys[at.stage] == NO_KEY) return;
            step(stages + at.stage * STAGE_BYTES, at.stage);
            __syncwarp();
            shared.steps.release(at.stage);
        }
    }

    DEVICE void write() {
        store_sums(softmax, shared.sums, share, row(0));
        named_barrier<CONSUMERS>(1);
        UNROLL for (int r = 0; r < 2; ++r) {
            const RowTotals totals(softmax.c, softmax.m[r], sum_of(shared.sums, row(r)));
            const i64 out = ((tile.b * x.p.S + tile.first + row(r) / H) * x.p.G + tile.g) * H + row(r) % H;
            if (exists(r) && share == 0 && lane % 4 == 0) x.lse[out] = totals.lse * LN_2;
            const bool empty = totals.scale == 0.0f;  // store 0: other tokens' values or a scale may be NaN
            UNROLL for (int j = 0; empty && j < COLUMNS / 8; ++j) acc[j][2 * r] = acc[j][2 * r + 1] = 0.0f;
            Stored::write_columns(x.o + out * DV + share * COLUMNS, acc, r, empty ? 0.0f : totals.scale * v_rate, exists(r));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) forward_tokens(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the stages, q, p
    __shared__ Shared shared;
    u16 *q_tile = reinterpret_cast<u16 *>(memory + STAGES * STAGE_BYTES), *p_tile = q_tile + ROWS * KP;
    if (threadIdx.x == CONSUMERS) {
        tma_prefetch(&x.k);
        tma_prefetch(&x.v);
        shared.steps.init(1 + 2 * PAGE_SCALES, SHARES);  // keys, and their scales; a lane of each warp
        mbarrier_fence_init();
    }
    wait_for_stream();
    const Tile tile(x);
    make_union<THREADS>(x.p, tile.b, tile.g, tile.first, tile.count);
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x < CONSUMERS + 32) produce_steps(x, tile, memory, shared);
        return;
    }
    Consumer consumer(x, tile, shared, q_tile, p_tile);
    consumer.load_q();
    consumer.attend(memory);
    consumer.write();
}
