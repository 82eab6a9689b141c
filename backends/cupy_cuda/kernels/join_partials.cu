// o and lse of the rows of a unit from their partials (block_partials.cu), and from the tiles of keys that adjacent tokens share, on Hopper.
//
//   s = c q k^T,  p = 2^(s - m),  acc = sum p v,  l = sum p                     over the shared tiles  (softmax.cuh)
//   w_i = 2^(lse_i - m),  o = (acc + sum_i w_i o_i) / (l + sum_i w_i),  lse = m + log2(l + sum_i w_i)
//
// Why: partials are most of the bytes that cuda-block moves, written once and read once. A tile that all of TQ adjacent tokens selected takes
//   two products here, 512 cycles of the tensor cores, and no memory. Of random selections these are the forced blocks, 3 of 16.
// Grid: one CTA for 64 rows of the unit, TQ = 64 / H adjacent tokens times H heads; PER_SM CTAs per multiprocessor. While one multiplies, the
//   others read partials, at memory speed.
// Partials: each warp has 16 rows, and brings a partial of each of its tokens to one of RING stages by bulk loads, which do not take registers.
//   What the products needed is their memory. The accumulators are exchanged between the lanes of a quad once, so that a lane has eight
//   adjacent columns of every 32, which it reads at once.
// Masks: which tiles are shared, and which entries have partials, is in two masks of a row (shared_tiles.cu). A row's limit cuts some shared
//   tiles; values that no row sees are zeroed, as 0 * NaN would reach acc.
//
//   H, EACH  heads of a group, which divide 64; entries of a row, n * reach, at most 64
//   PER_SM   CTAs per multiprocessor
//   RING     stages of a warp
#include "shared_tiles.cuh"
#include "wgmma.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int Q_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL;
constexpr int RUN = H < 16 ? H : 16, ROW_BYTES = DV * 2, STAGE_BYTES = 16 * ROW_BYTES;  // rows of a token in a warp; bytes of a partial

struct Arguments {
    TensorMap q, k, v;  // q: boxes of TQ tokens
    Problem p;
    i64 reach;
    const u64 *shared, *listed;  // [B,S,G], of shared_tiles.cu
    i64 rows, first_pair, first_row, pairs, section;  // `UnitRows` of units.py
    const u16 *part_o;           // [pairs, section, EACH, H, DV]
    const float *part_lse;       // [pairs, section, EACH, H], in base 2
    u16 *o;                      // [B,S,G,H,DV]
    float *lse;                  // [B,S,G,H]
};

// TQ tokens of a pair.
struct Tokens {
    u32 pair, within;            // the pair, and the first token, of the unit
    u32 b, g;                    // of the pair
    i64 s;                       // the first token
    int count, lowest, highest;  // tokens that exist, the least and the largest of their limits
    DEVICE Tokens(const Arguments &x) {
        const u32 each = (static_cast<u32>(x.rows) + TQ - 1) / TQ, G = x.p.G;
        pair = blockIdx.x / each;
        within = blockIdx.x % each * TQ;
        b = (static_cast<u32>(x.first_pair) + pair) / G;
        g = (static_cast<u32>(x.first_pair) + pair) % G;
        s = x.first_row + within;
        count = static_cast<int>(min(x.rows - within, static_cast<i64>(TQ)));
        int least = 0x7fffffff, most = 0;
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            const int limit = row_limit(x.p, b, s + i);
            least = min(least, limit);
            most = max(most, limit);
        }
        lowest = __reduce_min_sync(ALL_LANES, least);
        highest = __reduce_max_sync(ALL_LANES, most);
    }
    DEVICE i64 index(const Problem &p, int token) const { return (b * p.S + s + token) * p.G + g; }  // among B*S*G
};

// A thread's two rows, 8 apart, of the 64.
DEVICE int row_of_tile(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// Zero a tile's values from key `first` on.
DEVICE void zero_values(unsigned char *v_tile, int first) {
    for (int panel = 0; panel < V_BYTES; panel += PANEL)
        for (int i = first * 8 + threadIdx.x; i < KEYS * 8; i += THREADS)
            *reinterpret_cast<uint4 *>(v_tile + panel + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    __syncthreads();
}

// Of q, of a tile's keys and values, and of the warps' stages.
struct Barriers {
    u64 q, k, v, partials[WARPS][RING];
    DEVICE void init() {
        mbarrier_init(&q, 1);
        mbarrier_init(&k, 1);
        mbarrier_init(&v, 1);
        for (int i = 0; i < WARPS * RING; ++i) mbarrier_init(&partials[0][i], 1);
        mbarrier_fence_init();
    }
};

// acc and the softmax over the tiles that the tokens share.
DEVICE void attend_shared(const Arguments &x, const Tokens &tokens, unsigned char *memory, Barriers &full, float (&acc)[DV / 2],
                          OnlineSoftmax &softmax) {
    const u32 q = uniform(operand(shared_address(memory))), keys = q + Q_BYTES / 16, values = keys + Q_BYTES / 16;
    const i64 leader = tokens.index(x.p, 0);
    const int limit = row_limit(x.p, tokens.b, tokens.s), g = static_cast<int>(tokens.g), b = static_cast<int>(tokens.b);
    u64 tiles = x.shared[leader];
    if (!tiles) return;
    auto load_keys = [&](int key) {
        mbarrier_arrive_expect(&full.k, Q_BYTES);
        tma_load_key_tile<DK>(memory + Q_BYTES, &x.k, &full.k, key, g, b);
    };
    auto load_values = [&](int key) {
        mbarrier_arrive_expect(&full.v, V_BYTES);
        tma_load_key_tile<DV>(memory + 2 * Q_BYTES, &x.v, &full.v, key, g, b);
    };
    const auto first_key = [&] { return tile_of(x.p, static_cast<int>(x.reach), leader, limit, __ffsll(tiles) - 1) * KEYS; };
    int key = first_key();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&full.q, Q_BYTES);
        tma_load_row_tile<DK>(memory, &x.q, &full.q, g, static_cast<int>(tokens.s), b);
        load_keys(key);
        load_values(key);
    }
    mbarrier_wait(&full.q, 0);
    for (int parity = 0; tiles; parity ^= 1) {
        tiles &= tiles - 1;
        const int coming = tiles ? first_key() : 0;
        float s[KEYS / 2], alpha[2];
        u32 p[KEYS / 16][4];
        mbarrier_wait(&full.k, parity);
        wgmma_fence();
        wgmma_a_bt<DK>(s, q, keys);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all have read the keys
        if (tiles && threadIdx.x == 0) load_keys(coming);
        if (tokens.lowest < key + KEYS) {
            int limits[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) limits[r] = row_limit(x.p, tokens.b, tokens.s + min(row_of_tile(r) / H, tokens.count - 1)) - key;
            mask_columns(s, 0, limits, -infinity());
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            alpha[r] = softmax.raise(r, quad_max(row_max(s, r)));
            softmax.exponentiate(s, r, true);
        }
        scale_rows(acc, alpha);
        as_operand(p, s);
        mbarrier_wait(&full.v, parity);
        if (tokens.highest < key + KEYS) zero_values(memory + 2 * Q_BYTES, tokens.highest - key);
        wgmma_fence();
        wgmma_add_a_b<DV>(acc, p, values + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all have read the values
        if (tiles && threadIdx.x == 0) load_values(coming);
        key = coming;
    }
}

// A lane's share of the columns: of every 32, eight adjacent ones in place of two adjacent ones of every eight. As floats of wgmma.
DEVICE void adjacent_columns(float (&acc)[DV / 2]) {
#pragma unroll
    for (int j = 0; j < DV / 2; j += 16)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 x[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) x[n] = static_cast<u32>(__float_as_int(acc[j + 4 * n + i]));
            quad_transpose(x);
#pragma unroll
            for (int n = 0; n < 4; ++n) acc[j + 4 * n + i] = __int_as_float(static_cast<int>(x[n]));
        }
}

// Where the partial of entry 0 is of a row of the tile, among rows of DV columns; of a token that exists.
DEVICE i64 first_partial(const Arguments &x, const Tokens &tokens, int row) {
    const i64 token = tokens.pair * x.section + tokens.within + min(row / H, tokens.count - 1);
    return token * EACH * H + row % H;
}
// The entries of that row's token that have partials.
DEVICE u64 listed_entries(const Arguments &x, const Tokens &tokens, int row) {
    return row / H < tokens.count ? x.listed[tokens.index(x.p, row / H)] : 0;
}

// A warp's loads: round i brings partial number i of each of its tokens to stage i % RING. A lane has a token.
struct PartialLoads {
    const u16 *from;  // the partial of entry 0
    unsigned char *stages;
    u64 *full;
    u64 entries;  // that are still to be loaded
    DEVICE PartialLoads(const Arguments &x, const Tokens &tokens, unsigned char *memory, Barriers &barriers)
        : stages(memory + threadIdx.x / 32 * RING * STAGE_BYTES), full(barriers.partials[threadIdx.x / 32]) {
        const int first = threadIdx.x % 32 * RUN, row = threadIdx.x / 32 * 16 + min(first, 15);
        from = x.part_o + first_partial(x, tokens, row) * DV;
        entries = first < 16 ? listed_entries(x, tokens, row) : 0;
    }
    DEVICE void load(int stage) {
        const u32 loading = __ballot_sync(ALL_LANES, entries != 0);
        if (!loading) return;
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect(&full[stage], __popc(loading) * RUN * ROW_BYTES);
        __syncwarp();
        if (!entries) return;
        const i64 entry = __ffsll(entries) - 1;
        entries &= entries - 1;
        bulk_load_once(stages + stage * STAGE_BYTES + threadIdx.x % 32 * RUN * ROW_BYTES, from + entry * H * DV, RUN * ROW_BYTES, &full[stage]);
    }
};

// The log-sum-exps of a row's partials.
struct PartialTotals {
    const float *lse;  // of entry 0
    u64 entries;       // that are still to be added
    DEVICE PartialTotals(const Arguments &x, const Tokens &tokens, int row)
        : lse(x.part_lse + first_partial(x, tokens, row)), entries(listed_entries(x, tokens, row)) {}
    // The largest of all, or `top`; a lane reads a quarter of them, four at once.
    DEVICE float largest(float top) const {
#pragma unroll
        for (int first = 0; first < EACH; first += 16) {
            float found[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int entry = first + 4 * i + threadIdx.x % 4;
                found[i] = entry < EACH && entries >> entry & 1 ? lse[entry * H] : -infinity();
            }
            top = fmaxf(fmaxf(top, fmaxf(found[0], found[1])), fmaxf(found[2], found[3]));
        }
        return quad_max(top);
    }
    // That of the next entry; -inf if there is none.
    DEVICE float next() {
        if (!entries) return -infinity();
        const int entry = __ffsll(entries) - 1;
        entries &= entries - 1;
        return lse[entry * H];
    }
};

// acc += weight * o for row r of a partial, this lane's columns.
DEVICE void add_partial(float (&acc)[DV / 2], int r, float weight, const unsigned char *row) {
#pragma unroll
    for (int j = 0; j < DV / 32; ++j) {
        const uint4 o = *reinterpret_cast<const uint4 *>(row + threadIdx.x % 4 * 16 + j * 64);
        const u32 pairs[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            acc[16 * j + 4 * n + 2 * r] += weight * to_float(static_cast<u16>(pairs[n]));
            acc[16 * j + 4 * n + 2 * r + 1] += weight * to_float(static_cast<u16>(pairs[n] >> 16));
        }
    }
}

// The partials of this thread's two rows, relative to m, added to acc and l.
DEVICE void add_partials(PartialLoads &loads, PartialTotals (&totals)[2], float (&acc)[DV / 2], const float (&m)[2], float (&l)[2]) {
    const int rounds = __reduce_max_sync(ALL_LANES, max(__popcll(totals[0].entries), __popcll(totals[1].entries)));
    PipelineState<RING> at;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i, at.next()) {
        float weight[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) weight[r] = exp2_fast(totals[r].next() - m[r]);
        mbarrier_wait(&loads.full[at.stage], at.parity);
        const unsigned char *stage = loads.stages + at.stage * STAGE_BYTES + threadIdx.x % 32 / 4 * ROW_BYTES;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (weight[r] == 0.0f) continue;  // there may be none, and memory may hold anything
            l[r] += weight[r];
            add_partial(acc, r, weight[r], stage + 8 * r * ROW_BYTES);
        }
        __syncwarp();  // all lanes have read it
        loads.load(at.stage);
    }
}

// o and lse of this thread's two rows.
DEVICE void write_rows(const Arguments &x, const Tokens &tokens, const float (&acc)[DV / 2], const float (&m)[2], const float (&l)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row_of_tile(r);
        const RowTotals totals(1.0f, m[r], l[r]);
        if (row / H >= tokens.count) continue;
        const i64 index = tokens.index(x.p, row / H) * H + row % H;
        if (threadIdx.x % 4 == 0) x.lse[index] = totals.lse * LN_2;
#pragma unroll
        for (int j = 0; j < DV / 32; ++j) {
            u32 y[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) y[n] = pack(acc[16 * j + 4 * n + 2 * r] * totals.scale, acc[16 * j + 4 * n + 2 * r + 1] * totals.scale);
            *reinterpret_cast<uint4 *>(x.o + index * DV + 32 * j + threadIdx.x % 4 * 8) = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) join_partials(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q, a tile's keys, its values; then the warps' stages
    __shared__ Barriers full;
    start_next_kernel();
    const Tokens tokens(x);
    if (threadIdx.x == 0) full.init();
    __syncthreads();
    OnlineSoftmax softmax(x.p.scale_log2);
    float acc[DV / 2], m[2], l[2], alpha[2];
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) acc[i] = 0.0f;
    attend_shared(x, tokens, memory, full, acc, softmax);
    wait_for_kernel_ahead();  // which writes the partials
    PartialLoads loads(x, tokens, memory, full);
    for (int i = 0; i < RING; ++i) loads.load(i);
    adjacent_columns(acc);
    PartialTotals totals[2] = {{x, tokens, row_of_tile(0)}, {x, tokens, row_of_tile(1)}};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float own = fmaxf(softmax.m[r] * softmax.c, LOWEST);  // not -inf, however large the scale is
        m[r] = totals[r].largest(own);
        alpha[r] = exp2_fast(own - m[r]);
        l[r] = quad_sum(softmax.l[r]) * alpha[r];
    }
    scale_rows(acc, alpha);
    add_partials(loads, totals, acc, m, l);
    write_rows(x, tokens, acc, m, l);
}
