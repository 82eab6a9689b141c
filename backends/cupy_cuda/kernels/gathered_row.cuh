// Producer warps of forward_blocks.cu for blocks of fewer keys than a step: list a row's blocks, then copy them to the
// stages with cp.async, 16 bytes per lane. A box of TMA per block of four keys would take longer.
//
// List: first keys of the row's blocks in shared memory, NOTHING for padding, blocks past the limit, and duplicates.
//   Each block sets a bit. If none was set before, which is usual, no block is there twice. Otherwise one warp goes
//   through the list in order (named_blocks.cuh).
// Steps: UNITS entries of the list each, empty or not. A cluster's CTAs take every CLUSTER-th step.
#pragma once
#include "named_blocks.cuh"
#include "stored_tiles.cuh"

constexpr int KEYS = 64, K_BYTES = KEYS * DK * BYTES, V_BYTES = KEYS * DV * BYTES, STAGE_BYTES = K_BYTES + V_BYTES;  // of a step
constexpr int LAST = 1 << 30;         // flag in a step's key count
constexpr bool SMALL = BLOCK < KEYS;  // a step has several blocks
constexpr int LOADERS = 4, NOTHING = -1;  // warps: two for K, two for V
constexpr int UNIT = SMALL ? BLOCK : KEYS / 2, UNITS = KEYS / UNIT, SHARE_UNITS = UNITS / 2;  // keys per unit; units per step, and per warp

// Synchronize the producer warps.
DEVICE void loaders_sync() { named_barrier<32 * LOADERS>(2); }

// Units of a step, one per lane.
struct StepUnits {
    u32 step;  // number
    int keys;  // that the row sees of the lane's unit
    i64 from;  // offset of the unit's first key in the warp's tensor
};

template <class Shared> struct GatheringProducer {
    const Problem &p;
    unsigned char *const stages;
    Shared &shared;
    int *const list;      // [n], in shared memory
    NamedBlocks &named;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % LOADERS, thread = threadIdx.x % (32 * LOADERS);
    const bool of_keys = warp < LOADERS / 2;
    const int part = warp % (LOADERS / 2);
    PipelineState<STAGES> at;

    DEVICE void list_blocks(const Row &row, int limit) {
        loaders_sync();  // all have read the list of the row before
        const u32 n = p.n;
        constexpr int AT_ONCE = 4, THREADS = 32 * LOADERS;
        for (u32 first = thread; first < n; first += AT_ONCE * THREADS) {
            Range loaded[AT_ONCE];
            UNROLL for (int i = 0; i < AT_ONCE; ++i)
                if (first + i * THREADS < n) loaded[i] = Range(p, range_at(p, ranges_row(row.index) * n + first + i * THREADS));
            UNROLL for (int i = 0; i < AT_ONCE; ++i) {
                int start, stop;
                loaded[i].clamp(p, limit, start, stop);
                if (first + i * THREADS < n) list[first + i * THREADS] = stop > start ? start : NOTHING;
            }
        }
        for (int i = thread; NAMED_WORDS && i <= limit / (32 * BLOCK); i += THREADS) named.words[i] = 0;
        loaders_sync();
        bool twice = NAMED_WORDS == 0;
        for (u32 e = thread; NAMED_WORDS && e < n; e += THREADS) {
            const int block = list[e] / BLOCK;
            const u32 bit = 1u << block % 32;
            if (list[e] != NOTHING) twice |= (atomicOr(&named.words[block / 32], bit) & bit) != 0;
        }
        if (!named_barrier_any<THREADS>(2, twice)) return;
        if (warp == 0) drop_duplicates(limit);
        loaders_sync();
    }

    DEVICE void drop_duplicates(int limit) {
        const u32 n = p.n;
        named.clear(limit / BLOCK);
        for (u32 e = lane; e - lane < n; e += 32) {
            const int start = e < n ? list[e] : NOTHING;
            if (!named.add(start / BLOCK, start != NOTHING) && e < n) list[e] = NOTHING;
        }
    }

    // Return the first step from `step` on, by CLUSTER, of which the row sees a key; its units are those of the warp's
    // share. Past the last step if there is none.
    DEVICE StepUnits find(const Row &row, const KeysTensor &x, u32 step, int limit) const {
        const u32 n = p.n;
        for (; step * UNITS < n; step += CLUSTER) {
            const u32 e = step * UNITS + lane;
            const int start = lane < UNITS && e < n ? list[e] : NOTHING;
            const int keys = start == NOTHING ? 0 : min(limit - start, UNIT);
            if (!__ballot_sync(ALL_LANES, keys > 0)) continue;
            const i64 page = keys ? page_of(p, row.b, start) : 0;
            return {step, keys, keys ? page * x.stride_b + in_page(start) * x.stride_n : 0};
        }
        return {step, 0, 0};
    }

    // Copy this warp's units of a step to rows of the stage's tile; zeros for keys that the row does not see.
    template <int COLUMNS> DEVICE void copy(unsigned char *tile, const u16 *x, i64 stride, const StepUnits &units) const {
        constexpr int CHUNKS = COLUMNS / 8, AT_ONCE = 32 / CHUNKS;  // of a row; rows at once
        const int chunk = lane % CHUNKS, first = lane / CHUNKS;
        unsigned char *to = tile + chunk / 8 * PANEL;
#pragma unroll 2
        for (int u = part * SHARE_UNITS; u < (part + 1) * SHARE_UNITS; ++u) {
            const u16 *from = x + __shfl_sync(ALL_LANES, units.from, u) + chunk * 8;
            const int keys = __shfl_sync(ALL_LANES, units.keys, u);
            UNROLL for (int i = 0; i < UNIT; i += AT_ONCE) {
                const int r = first + i;
                cp_async_16(reinterpret_cast<u16 *>(to + swizzled(u * UNIT + r, chunk % 8)), from + r * stride, r < keys);
            }
        }
    }

    // Publish which keys a step has, by the first warp of K.
    DEVICE void publish(const StepUnits &units, bool last) {
        const bool whole = __ballot_sync(ALL_LANES, lane >= UNITS || units.keys == UNIT) == ALL_LANES;
        if (lane < UNITS) shared.unit_keys[at.stage][lane] = units.keys;
        if (lane == 0) shared.keys[at.stage] = (whole ? KEYS : 1) | (last ? LAST : 0);
    }

    DEVICE void load_row(const Row &row, u32 rank, const int *position) {
        const int limit = row_limit(p, row.s, position);
        list_blocks(row, limit);
        const KeysTensor &x = of_keys ? p.k : p.v;
        const u16 *base = x.data + row.g * x.stride_g;
        u64 *full = of_keys ? shared.steps.full : shared.values;
        StepUnits coming = find(row, x, rank, limit);
        const bool some = coming.step * UNITS < p.n;
        do {
            const StepUnits units = coming;
            coming = find(row, x, units.step + CLUSTER, limit);  // one step ahead: its pages arrive meanwhile
            const bool last = coming.step * UNITS >= p.n;
            shared.steps.wait_empty(at);
            __syncwarp();
            unsigned char *stage = stages + at.stage * STAGE_BYTES;
            if (some && of_keys) copy<DK>(stage, base, x.stride_n, units);
            if (some && !of_keys) copy<DV>(stage + K_BYTES, base, x.stride_n, units);
            cp_async_mbarrier_arrive(&full[at.stage]);
            if (of_keys && part == 0) {
                if (some) publish(units, last);
                else if (lane == 0) shared.keys[at.stage] = LAST;  // a row without keys is one step of zero keys
                __syncwarp();
                shared.steps.announce(at.stage);
            }
            at.next();
        } while (coming.step * UNITS < p.n);
    }
};
