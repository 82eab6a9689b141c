// Partial o and log-sum-exp of every (row, range) on Hopper: visit each KV tile once with the rows that selected it, in
// the units and lists of triton-block. join_partials.cu or triton-block's join kernel merges them.
//
//   s = c q k^T,  p = 2^(s - m),  l = sum p,  o = p v / l,  lse = m + log2 l
//
// Grid: one CTA for each segment of each list of the unit, in the order of the lists; two CTAs per multiprocessor.
// Tiles: 64 rows, TQ = 64 / H listed tokens times H heads, by TILE keys. Keys and values stay; a step loads q alone. For
//   128 columns writing o takes 910 cycles, the tensor cores 512 for 64 keys and 1024 for 128 (docs/kernels.md).
// Warpgroups: two, which take steps in turn. Each has its own stages, and loads q through TMA, one token per lane, once
//   the logits of the stage's last step are there; there are no registers for a producer warp.
// Masks: only the first entries of a list can lie within the tile. Values that no row of the segment sees are zeroed
//   once, because 0 * NaN is NaN.
// Columns: a lane's accumulators are columns 8 j + 2 c and the next one, c its number in its quad. Columns of v are
//   permuted once, so that those of four j are eight adjacent columns of o, which the lane stores at once.
//
//   TILE           keys of a tile: 64, or 128 for blocks of that size, which have one partial then instead of two
//   STAGES, STEPS  stages of q of a warpgroup; most steps of a segment
//   JOINED         pages of many requests (problem.cuh). There may be many more lists than segments, so that CTAs take
//                  segments until none is left
#include "row_steps.cuh"

constexpr int PER_SM = 2, WARPGROUPS = 2, THREADS = 128 * WARPGROUPS, Q_BYTES = K_BYTES;
constexpr int NEXT = TILE * 128;  // bytes between 64-column panels of the tile
constexpr int TILE_K_BYTES = DK / 64 * NEXT, TILE_V_BYTES = DV / 64 * NEXT;

struct Arguments {
    TensorMap q, k, v;
    Problem p;
    const int *entries;  // (s * n + range) * reach + step, list after list
    i64 reach;
    const u64 *listed;  // [B,S,G]: the entries of a row that have partials (shared_tiles.cu); null: all
    UnitLists lists;
    u16 *part_o;      // [pairs, section, n * reach, H, DV]
    float *part_lse;  // [pairs, section, n * reach, H], in base 2
    u32 *counter;     // JOINED: segments of the unit that CTAs have requested; zero before and after
    const float *factors;  // JOINED 2: of keys and values [pages, G, 2]
};
typedef UnitSteps<Arguments> Steps;

// The entries of the segment that have partials, in their order; returns how many. For all threads.
DEVICE int keep_listed(const Arguments &x, const UnitSegment &segment, int *kept) {
    __shared__ int counts[THREADS / 32];
    const u32 before = (1u << threadIdx.x % 32) - 1, warp = threadIdx.x / 32;
    const int entries = segment.entries;
    int all = 0;
    for (int first = 0; first < entries; first += THREADS) {
        const int i = first + threadIdx.x, entry = i < entries ? segment.listed[i] : 0;
        const u32 each = segment.each, row = static_cast<u32>(entry) / each;
        bool keeps = i < entries;
        if (x.listed && keeps) keeps = x.listed[(segment.b * x.p.S + row) * x.p.G + segment.g] >> entry % each & 1;
        const u32 votes = __ballot_sync(ALL_LANES, keeps);
        if (threadIdx.x % 32 == 0) counts[warp] = __popc(votes);
        __syncthreads();
        int at = all + __popc(votes & before);
        for (u32 other = 0; other < THREADS / 32; ++other) {
            if (other < warp) at += counts[other];
            all += counts[other];
        }
        if (keeps) kept[at] = entry;
        __syncthreads();
    }
    return all;
}

// No entries need masks if their rows, at any positions, see the whole tile. Call prepare_values next.
DEVICE void find_masked_entries(const Steps &list, UnitSegment &segment) {
    if (!list.x.p.q_pos) return;
    bool cut = false;
    for (int entry = threadIdx.x; entry < list.segment.entries; entry += THREADS)
        cut |= row_limit(list.x.p, list.b, list.row_of(entry)) - list.first_key < TILE;
    if (!named_barrier_any<THREADS>(1, cut) && threadIdx.x == 0) segment.masked_entries = 0;
}

// Permute every 32 columns of the values: 8 c + 2 j to 8 j + 2 c. Zero those that no row of the segment sees.
DEVICE void prepare_values(const Steps &list, unsigned char *v_tile) {
    const int limit = last_seen_key<THREADS>(list);
    for (int i = threadIdx.x; i < TILE * (DV / 32); i += THREADS) {
        const int key = i % TILE, chunk = i / TILE * 4;  // of the 16-byte chunks of a key
        uint4 *chunks[4];
        u32 x[4][4];
        UNROLL for (int c = 0; c < 4; ++c) {
            chunks[c] = reinterpret_cast<uint4 *>(v_tile + chunk / 8 * NEXT + swizzled(key, chunk % 8 + c));
            const uint4 four = key < limit ? *chunks[c] : make_uint4(0, 0, 0, 0);
            x[c][0] = four.x, x[c][1] = four.y, x[c][2] = four.z, x[c][3] = four.w;
        }
        UNROLL for (int j = 0; j < 4; ++j) *chunks[j] = make_uint4(x[0][j], x[1][j], x[2][j], x[3][j]);
    }
    fence_async_proxy();
    named_barrier<THREADS>(1);
}

// -inf in place of the logits of keys that the rows of these tile rows do not see.
DEVICE void mask_logits(const Steps &list, float (&s)[TILE / 2], int step, int row0) {
    int limits[2];
    UNROLL for (int r = 0; r < 2; ++r) {
        const int number = list.number(step, row0 + 8 * r);
        limits[r] = number < 0 ? TILE : row_limit(list.x.p, list.b, list.row_of(number)) - list.first_key;
    }
    mask_columns(s, 0, limits, -infinity());
}

// A warpgroup's q of a step into one of its stages: a token a lane, of all warps.
DEVICE void load_rows(const Steps &list, int step, unsigned char *stage, u64 *full) {
    if (step >= list.steps) return;
    if (threadIdx.x % 128 == 0) mbarrier_arrive_expect(full, TQ * H * 2 * DK);
    const int token = threadIdx.x % 32 * 4 + threadIdx.x % 128 / 32;
    if (token < TQ)
        tma_load_row_tile<DK>(stage + token * H * 128, &list.x.q, full, static_cast<int>(list.g), list.row(step, token), static_cast<int>(list.b));
}

DEVICE void attend(const Steps &list, unsigned char *k_tile, unsigned char *stages, u64 *tile, int parity, u64 *full,
                   int2 &state, const PageFactors &factors, int warpgroup) {
    const Arguments &x = list.x;
    const u32 keys = uniform(operand(shared_address(k_tile))), values = keys + TILE_K_BYTES / 16, stage0 = uniform(operand(shared_address(stages)));
    const int row0 = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const i64 first_row = list.segment.first_entry * H;
    PipelineState<STAGES> at{state.x, state.y}, to = at;
    for (int i = 0; i < STAGES; ++i, to.next()) load_rows(list, warpgroup + i * WARPGROUPS, stages + to.stage * Q_BYTES, full + to.stage);
    mbarrier_wait(tile, parity);
    prepare_values(list, k_tile + TILE_K_BYTES);
    wait_for_kernel_ahead();  // which reads the partials of the unit before
    for (int step = warpgroup; step < list.steps; step += WARPGROUPS, at.next()) {
        const int entries[2] = {list.entry(step, row0), list.entry(step, row0 + 8)};
        float s[TILE / 2], o[DV / 2];
        mbarrier_wait(full + at.stage, at.parity);
        wgmma_fence();
        wgmma_a_bt<DK, NEXT>(s, uniform(stage0 + at.stage * (Q_BYTES / 16)), keys);
        wgmma_commit();
        wgmma_wait<0>();
        named_barrier<128>(2 + warpgroup);  // all warps have read q
        load_rows(list, step + STAGES * WARPGROUPS, stages + at.stage * Q_BYTES, full + at.stage);
        if (step * TQ < list.segment.masked_entries) mask_logits(list, s, step, row0);
        OnlineSoftmax softmax(JOINED == 2 ? factors.k : x.p.scale_log2);
        float scale[2];
        UNROLL for (int r = 0; r < 2; ++r) {
            softmax.m[r] = fmaxf(quad_max(row_max(s, r)), LOWEST);
            softmax.exponentiate(s, r, true);
            const RowTotals totals(softmax.c, softmax.m[r], quad_sum(softmax.l[r]));
            scale[r] = JOINED == 2 ? totals.scale * factors.v : totals.scale;
            if (entries[r] >= 0 && threadIdx.x % 4 == 0)
                x.part_lse[first_row + static_cast<i64>(entries[r]) * H + (row0 + 8 * r) % H] = totals.lse;
        }
        u32 p[TILE / 16][4];
        as_operand(p, s);
        UNROLL for (int i = 0; i < DV / 2; ++i) o[i] = 0.0f;
        wgmma_fence();
        wgmma_add_a_b<DV>(o, p, values + (NEXT / 16 << 16));
        wgmma_commit();
        wgmma_wait<0>();
        UNROLL for (int r = 0; r < 2; ++r)
            if (entries[r] >= 0) write_row<true>(x.part_o + (first_row + static_cast<i64>(entries[r]) * H + (row0 + 8 * r) % H) * DV, o, r, scale[r]);
    }
    if (JOINED && threadIdx.x % 128 == 0) state = make_int2(at.stage, at.parity);
}

// Return the next segment. As many requests as segments are made, so that the last one wraps the counter to zero.
DEVICE u32 request_segment(const Arguments &x) {
    const UnitLists &lists = x.lists;
    const i64 segments = lists.segments[lists.end_list] - lists.segments[lists.first_list];
    return gridDim.x + atomicInc(x.counter, static_cast<u32>(segments - 1));
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) block_partials(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the tile's keys and values, the stages
    __shared__ u64 tile, full[WARPGROUPS][STAGES];
    __shared__ UnitSegment segment;
    __shared__ int listed[STEPS * TQ];
    __shared__ struct {
        u32 segment, next;
        int parity;  // of `tile`
        int2 at[WARPGROUPS];  // stage and parity of the warpgroups' next steps
        PageFactors factors;  // of the tile
    } turn;  // in shared memory, because registers are scarce
    start_next_kernel();
    const int warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        turn.segment = blockIdx.x;
        turn.parity = 0;
        for (int2 &at : turn.at) at = make_int2(0, 0);
    }
    __syncwarp();
    if (threadIdx.x == 32) {
        mbarrier_init(&tile, 1);
        for (int i = 0; i < WARPGROUPS * STAGES; ++i) mbarrier_init(&full[0][i], 1);
        mbarrier_fence_init();
    }
    for (;;) {
        if (threadIdx.x < 32) segment.find<TILE>(x.lists, x.p, x.entries, x.reach, turn.segment);
        __syncthreads();
        if (JOINED && segment.entries == 0) break;
        if (JOINED && threadIdx.x == THREADS / 2) turn.next = request_segment(x);
        const int kept = keep_listed(x, segment, listed);
        if (kept > 0) {
            if (threadIdx.x == 0) {
                segment.listed = listed;
                segment.entries = kept;
            }
            __syncthreads();
            const Steps list{x, segment};
            if (threadIdx.x == 0) {
                const int b = page_of(x.p, static_cast<int>(list.b), list.first_key), g = static_cast<int>(list.g);
                mbarrier_arrive_expect(&tile, TILE_K_BYTES + TILE_V_BYTES);
                tma_load_key_tile<DK, false, 64, NEXT>(memory, &x.k, &tile, in_page(list.first_key), g, b);
                tma_load_key_tile<DV, false, 64, NEXT>(memory + TILE_K_BYTES, &x.v, &tile, in_page(list.first_key), g, b);
                turn.factors = page_factors(x.factors, x.p, list.first_key, g);
                turn.factors.k *= static_cast<float>(x.p.scale_log2);
            }
            find_masked_entries(list, segment);
            attend(list, memory, memory + TILE_K_BYTES + TILE_V_BYTES + warpgroup * STAGES * Q_BYTES, &tile, turn.parity, full[warpgroup], turn.at[warpgroup], turn.factors, warpgroup);
        } else wait_for_kernel_ahead();
        if (!JOINED) break;
        __syncthreads();  // all have read the tile and the segment
        if (threadIdx.x == 0) {
            turn.segment = turn.next;
            turn.parity ^= kept > 0;
        }
        __syncwarp();
    }
}
