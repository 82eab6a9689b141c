// dk, dv and the partial sums of dq on Hopper: one visit of a KV tile with the rows that selected it, in the units and lists of triton-block
// (_triton/units.py, _triton/key_to_rows.py), whose kernels add up the shares of dq.
//
//   p^T = 2^(c k q^T - lse),  ds^T = p^T * (v do^T - delta)
//   dv = sum p^T do,  dk = scale * sum ds^T q,  and for each (row, range)  dq = scale * ds k
//
// Grid: one CTA for each segment of each list of the unit, in the order of the lists; two CTAs per multiprocessor, as in dkdv_groups.cu: one
//   computes p and ds, begins, ends or stores while the other multiplies.
// Sections: a list with one segment adds its rows to the sums of the sections before, in registers; sum_sections.cu does so for others.
// Tiles: 64 keys by 64 rows (row_steps.cuh). Keys are the rows of all products but the last one, whose operand ds^T goes through shared memory.
//   Its columns are computed 64 at a time, as the accumulators of dk and dv leave no room for more.
// Masks: rows of a list are in order, so that only the first entries can lie within the tile. Where no row of the segment sees a key, k may be
//   NaN, which 0 * k would not cancel in dq: such keys are zeroed once. p and ds of masked keys are replaced, not multiplied, by 0.
#include "row_steps.cuh"
#include "unit_lists.cuh"

constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 32;  // a thread

struct Arguments {
    TensorMap q, d_o, k, v;
    Problem p;
    HeadsTensor d_out;         // do [B,S,G,h,DV]
    const float *lse, *delta;  // [rows, H], lse natural
    const int *entries;        // (s * n + range) * reach + step, list after list
    i64 reach;
    UnitGradients to;
    u16 *part_dq;  // [pairs, section, n * reach, H, DK]
};

// A CTA's work: the entries of a segment. One thread finds it, in shared memory.
struct Found {
    const int *listed;            // its entries
    u16 *dq;                      // where the shares of entry 0 of (b, g) go
    i64 row;                      // of the sums or parts, where the segment's first key goes
    int entries, masked_entries;  // all, and those at the beginning whose rows may lie within the tile
    int each;                     // entries of a row
    float scale;
    int first_key, b, g;
    bool alone;  // the list has no other segment

    DEVICE void find(const Arguments &x, u32 index) {
        const UnitLists &lists = x.to.lists;
        const i64 segment = lists.segments[lists.first_list] + index;
        entries = 0;
        if (segment >= lists.segments[lists.end_list]) return;
        i64 list = lists.first_list;  // the last one whose segments begin at or before this one
        for (i64 beyond = lists.end_list; beyond - list > 1;) {
            const i64 middle = (list + beyond) / 2;
            (lists.segments[middle] <= segment ? list : beyond) = middle;
        }
        const UnitList unit(lists, list);
        const i64 begin = lists.begins[list] + (segment - lists.segments[list]) * lists.segment, bg = unit.pair;
        listed = x.entries + begin;
        entries = static_cast<int>(min(lists.begins[list + 1] - begin, lists.segment));
        masked_entries = x.p.q_pos ? entries : static_cast<int>(lists.begins[list] + KEYS - begin);
        each = static_cast<int>(x.p.n * x.reach);
        scale = static_cast<float>(x.p.scale);
        first_key = static_cast<int>(unit.tile) * KEYS;
        b = static_cast<int>(bg / x.p.G);
        g = static_cast<int>(bg % x.p.G);
        alone = unit.segments == 1;
        row = alone ? unit.sum_row(lists) : index * static_cast<i64>(KEYS);
        dq = x.part_dq + ((bg - lists.first_pair) * lists.section - lists.first_row) * each * H * DK;
    }
};

// The steps of a segment. Its numbers stay in shared memory: the producers have few registers.
struct Steps {
    const Arguments &x;
    const Found &found;
    const int first_key, steps;
    const i64 b, g;
    DEVICE Steps(const Arguments &arguments, const Found &found)
        : x(arguments), found(found), first_key(found.first_key), steps((found.entries + TQ - 1) / TQ), b(found.b), g(found.g) {}
    DEVICE int row_of(int entry) const { return static_cast<int>(static_cast<u32>(found.listed[entry]) / static_cast<u32>(found.each)); }
    DEVICE int row(int step, int i) const {
        const int entry = step * TQ + i;
        return i < TQ && entry < found.entries ? row_of(entry) : static_cast<int>(x.p.S);
    }
    // The entry that tile row i of a step belongs to; negative if the list has no such row.
    DEVICE int entry(int step, int i) const {
        const int at = step * TQ + i / H;
        return i < TQ * H && at < found.entries ? found.listed[at] : -1;
    }
};

// The tile's keys that no row of the segment sees become zeros.
DEVICE void zero_unseen_keys(const Steps &list, unsigned char *k_tile) {
    __shared__ int limits[4];
    const Problem &p = list.x.p;
    int limit = 0;
    for (int entry = p.q_pos ? threadIdx.x : list.found.entries - 1; entry < list.found.entries; entry += 128)  // by default the last sees most
        limit = max(limit, row_limit(p, list.b, list.row_of(entry)) - list.first_key);
    for (int far = 16; far > 0; far /= 2) limit = max(limit, __shfl_xor_sync(ALL_LANES, limit, far));
    if (threadIdx.x % 32 == 0) limits[threadIdx.x / 32] = limit;
    named_barrier<128>(1);
    limit = max(max(limits[0], limits[1]), max(limits[2], limits[3]));
    if (limit >= KEYS) return;
    for (int i = threadIdx.x; i < K_BYTES / 16; i += 128)
        if (i % (PANEL / 16) / 8 >= limit) *reinterpret_cast<uint4 *>(k_tile + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    named_barrier<128>(1);
}

// ds^T as operand a of the product with keys: 64 keys of 64 rows, in a swizzled panel. For all threads once the barrier is passed.
DEVICE void store_operand(unsigned char *tile, const u32 (&ds)[ROWS / 16][4]) {
    const int lane = threadIdx.x % 32, key0 = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
            *reinterpret_cast<u32 *>(tile + swizzled(key0 + 8 * r, j) + lane % 4 * 4) = ds[j / 2][j % 2 * 2 + r];
    fence_async_proxy();
    named_barrier<128>(1);
}

// Columns [column, column + 64) of the shares of dq of tile rows row0 and row0 + 8, which belong to these entries: 16 bytes a lane.
DEVICE void store_shares(u16 *to, const float (&dq)[32], float scale, const int (&entries)[2], int row0, int column) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u16 *row = to + (static_cast<i64>(entries[r]) * H + (row0 + 8 * r) % H) * DK + column + threadIdx.x % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = half * 16 + i * 4 + r * 2;
                x[i] = pack(dq[at] * scale, dq[at + 1] * scale);
            }
            quad_transpose(x);
            if (entries[r] >= 0) store_once(row + half * 32, make_uint4(x[0], x[1], x[2], x[3]));
        }
    }
}

DEVICE void accumulate(const Steps &list, unsigned char *k_tile, unsigned char *ds_tile, unsigned char *stages, Shared &shared) {
    const Arguments &x = list.x;
    const u32 keys = uniform(operand(shared_address(k_tile))), values = keys + K_BYTES / 16;
    const u32 stage0 = uniform(operand(shared_address(stages))), ds_operand = uniform(operand(shared_address(ds_tile)));
    const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    float dk[DK / 2], dv[DV / 2], s[ROWS / 2], dp[ROWS / 2];
    load_sums<DK>(dk, x.to.sum_dk, list.found.row + threadIdx.x / 32 * 16, list.found.alone && x.to.adds);
    load_sums<DV>(dv, x.to.sum_dv, list.found.row + threadIdx.x / 32 * 16, list.found.alone && x.to.adds);
    mbarrier_wait(&shared.tile, 0);
    zero_unseen_keys(list, k_tile);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const u32 q_tile = uniform(stage0 + at.stage * (STAGE_BYTES / 16)), do_tile = q_tile + K_BYTES / 16;
        const int entries[2] = {list.entry(step, row0), list.entry(step, row0 + 8)};
        wait_for_rows(shared, at);
        wgmma_fence();
        wgmma_a_bt<DK>(s, keys, q_tile);
        wgmma_commit();
        wgmma_a_bt<DV>(dp, values, do_tile);
        wgmma_commit();
        wgmma_wait<1>();  // p^T while dp^T is computed
        exponentiate(s, shared.lse[at.stage], x.p.scale_log2);
        const bool masked = step * TQ < list.found.masked_entries;
        if (masked) mask_keys(x.p, s, shared.limit[at.stage]);
        wgmma_wait<0>();
        if (masked) mask_keys(x.p, dp, shared.limit[at.stage]);
        u32 weights[ROWS / 16][4], ds[ROWS / 16][4];
        as_operands(weights, ds, s, dp, shared.delta[at.stage]);
        store_operand(ds_tile, ds);
        float dq[DK / 64][32];
        wgmma_fence();
        wgmma_add_a_b<DV>(dv, weights, do_tile + TRANSPOSED);
        wgmma_add_a_b<DK>(dk, ds, q_tile + TRANSPOSED);
        wgmma_at_b<KEYS / 16>(dq[0], ds_operand + TRANSPOSED, keys + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
        shared.steps.release(at.stage);
        if (DK > 64) {  // computed while the first columns are stored
            wgmma_fence();
            wgmma_at_b<KEYS / 16>(dq[DK / 64 - 1], ds_operand + TRANSPOSED, keys + (DK / 64 - 1) * PANEL / 16 + TRANSPOSED);
            wgmma_commit();
        }
        store_shares(list.found.dq, dq[0], list.found.scale, entries, row0, 0);
        wgmma_wait<0>();
        if (DK > 64) store_shares(list.found.dq, dq[DK / 64 - 1], list.found.scale, entries, row0, 64);
        named_barrier<128>(1);  // all warps have read ds
    }
    const bool alone = list.found.alone, final = alone && x.to.final;
    const i64 key = list.first_key + threadIdx.x / 32 * 16;
    const GradientRows rows(list.found.row + threadIdx.x / 32 * 16, (list.b * x.p.G + list.g) * x.p.S_kv + key, x.p.S_kv - key, final);
    rows.write<DK>(dk, final ? list.found.scale : 1.0f, 0, alone ? x.to.sum_dk : x.to.part_dk, x.to.dk);
    rows.write<DV>(dv, 1.0f, 0, alone ? x.to.sum_dv : x.to.part_dv, x.to.dv);
}

extern "C" __global__ void __launch_bounds__(256, 2) block_gradients(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the tile's keys and values, ds, the stages
    __shared__ Shared shared;
    __shared__ Found found;
    unsigned char *ds_tile = memory + K_BYTES + V_BYTES, *stages = ds_tile + PANEL;
    const int producer = threadIdx.x / 32 - 4;
    if (threadIdx.x == 0) {
        found.find(x, blockIdx.x);
        shared.init();
    }
    zero_stages(stages);
    __syncthreads();
    if (found.entries <= 0) return;
    if (producer < 0) {
        reallocate_registers<1, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 2>(true);
        accumulate(Steps(x, found), memory, ds_tile, stages, shared);
        return;
    }
    reallocate_registers<1, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 2>(false);
    const Steps list(x, found);
    if (threadIdx.x == 128) produce_tile(list, memory, shared);
    __syncwarp();
    produce_rows(list, stages, shared, producer);
}
