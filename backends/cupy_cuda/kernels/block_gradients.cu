// dk, dv and partial sums of dq on Hopper: visit each KV tile once with the rows that selected it, in the units and
// lists of triton-block (_triton/units.py, _triton/key_to_rows.py), whose kernels sum the shares of dq.
//
//   p^T = 2^(c k q^T - lse),  ds^T = p^T * (v do^T - delta)
//   dv = sum p^T do,  dk = scale * sum ds^T q,  and for each (row, range)  dq = scale * ds k
//
// Grid: one CTA per segment of a list of the unit, in the order of order_segments.cu; two per multiprocessor, as in
//   dkdv_groups.cu.
// Sections: a list with one segment adds its rows to the sums of the sections before, in registers; sum_sections.cu
//   does so for others.
// Tiles: 64 keys by 64 rows (row_steps.cuh). Keys are the rows of all products but the last one, whose operand ds^T
//   goes through shared memory; its columns are computed 64 at a time, because registers are scarce.
// Masks: only the first entries of a list can lie within the tile. Keys that no row of the segment sees are zeroed
//   once, because 0 * NaN is NaN; p and ds of other masked keys are replaced, not multiplied, by 0.
// Shared tiles: join_shares.cu computes what tiles that adjacent tokens share add to dq. Steps of such entries only
//   skip the product of ds with keys.
//
//   SEGMENT  most entries per segment if shared tiles are left out, which one bit per entry says; 0: none is
#include "row_steps.cuh"

constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 32;  // a thread

struct Arguments {
    TensorMap q, d_o, k, v;  // of q and do the tokens of a step
    TensorMap q_token, d_o_token;
    Problem p;
    HeadsTensor d_out;         // do [B,S,G,h,DV]
    const float *lse, *delta;  // [rows, H], lse natural
    const int *entries;        // (s * n + range) * reach + step, list after list
    i64 reach;
    UnitGradients to;
    u16 *part_dq;        // [pairs, section, n * reach, H, DK]
    const uint2 *order;  // [segments]: list and number (order_segments.cu)
    const u64 *listed;   // [B,S,G]: a row's entries that have shares (shared_tiles.cu), if SEGMENT
};

// A CTA's segment, and where its sums go.
struct Found : UnitSegment {
    u16 *dq;      // where the shares of entry 0 of (b, g) go
    i64 row;      // of the sums or parts, where the segment's first key goes
    float scale;
    bool alone;  // the list has no other segment

    DEVICE void find(const Arguments &x, u32 index) {
        const UnitLists &lists = x.to.lists;
        if (!UnitSegment::find(lists, x.p, x.entries, x.reach, index, x.order)) return;
        const UnitList unit(lists, list);
        scale = static_cast<float>(x.p.scale);
        alone = unit.segments == 1;
        row = alone ? unit.sum_row(lists) : part * static_cast<i64>(KEYS);
        dq = x.part_dq + first_entry * H * DK;
    }
};

typedef UnitSteps<Arguments, Found> Steps;

// The entries of a segment whose partial dq is stored (its shares): one bit per entry, or all.
struct ListedShares {
    u32 bits[SEGMENT ? (SEGMENT + 127) / 128 * 4 : 4];
    DEVICE void find(const Steps &list) {
#pragma unroll 4
        for (int first = 0; first < list.segment.entries; first += 128) {
            const int at = first + threadIdx.x;
            bool has = false;
            if (at < list.segment.entries) {
                const u32 entry = list.segment.listed[at], each = list.segment.each;
                has = list.x.listed[(list.b * list.x.p.S + entry / each) * list.x.p.G + list.g] >> entry % each & 1;
            }
            const u32 all = __ballot_sync(ALL_LANES, has);
            if (threadIdx.x % 32 == 0) bits[at / 32] = all;
        }
    }
    DEVICE bool has(int number) const { return number >= 0 && bits[number / 32] >> number % 32 & 1; }
    DEVICE bool any(int step) const {  // TQ divides 64
        if (TQ == 64) return uniform(bits[2 * step] | bits[2 * step + 1]);
        return uniform(bits[step * TQ / 32] >> step * TQ % 32 & (~0u >> (32 - min(TQ, 32))));
    }
};
struct AllShares {
    DEVICE void find(const Steps &) {}
    DEVICE bool has(int number) const { return number >= 0; }
    DEVICE bool any(int) const { return true; }
};
typedef If<(SEGMENT > 0), ListedShares, AllShares> Shares;

// The tile's keys that no row of the segment sees become zeros.
DEVICE void zero_unseen_keys(const Steps &list, unsigned char *k_tile) {
    const int limit = last_seen_key<128>(list);
    if (limit >= KEYS) return;
    for (int i = threadIdx.x; i < K_BYTES / 16; i += 128)
        if (i % (PANEL / 16) / 8 >= limit) *reinterpret_cast<uint4 *>(k_tile + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    named_barrier<128>(1);
}

// Store ds^T [keys, rows] as operand a of the product with keys, in a swizzled panel; passes a barrier.
DEVICE void store_operand(unsigned char *tile, const u32 (&ds)[ROWS / 16][4]) {
    const int lane = threadIdx.x % 32, key0 = threadIdx.x / 32 * 16 + lane / 4;
    UNROLL for (int j = 0; j < ROWS / 8; ++j)
        UNROLL for (int r = 0; r < 2; ++r)
            *reinterpret_cast<u32 *>(tile + swizzled(key0 + 8 * r, j) + lane % 4 * 4) = ds[j / 2][j % 2 * 2 + r];
    fence_async_proxy();
    named_barrier<128>(1);
}

// Store columns [column, column + 64) of the shares of dq of tile rows row0 and row0 + 8.
DEVICE void store_shares(u16 *to, const float (&dq)[32], float scale, const int (&entries)[2], int row0, int column) {
    UNROLL for (int r = 0; r < 2; ++r) {
        u16 *row = to + (static_cast<i64>(entries[r]) * H + (row0 + 8 * r) % H) * DK + column + threadIdx.x % 4 * 8;
        UNROLL for (int half = 0; half < 2; ++half) {
            u32 x[4];
            UNROLL for (int i = 0; i < 4; ++i) {
                const int at = half * 16 + i * 4 + r * 2;
                x[i] = pack(dq[at] * scale, dq[at + 1] * scale);
            }
            quad_transpose(x);
            if (entries[r] >= 0) store_once(row + half * 32, make_uint4(x[0], x[1], x[2], x[3]));
        }
    }
}

DEVICE void accumulate(const Steps &list, unsigned char *k_tile, unsigned char *ds_tile, unsigned char *stages, Shared &shared,
                       Shares &shares) {
    const Arguments &x = list.x;
    const u32 keys = uniform(operand(shared_address(k_tile))), values = keys + K_BYTES / 16;
    const u32 stage0 = uniform(operand(shared_address(stages))), ds_operand = uniform(operand(shared_address(ds_tile)));
    const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    float dk[DK / 2], dv[DV / 2], s[ROWS / 2], dp[ROWS / 2];
    load_sums<DK>(dk, x.to.sum_dk, list.segment.row + threadIdx.x / 32 * 16, list.segment.alone && x.to.adds);
    load_sums<DV>(dv, x.to.sum_dv, list.segment.row + threadIdx.x / 32 * 16, list.segment.alone && x.to.adds);
    shares.find(list);
    mbarrier_wait(&shared.tile, 0);
    zero_unseen_keys(list, k_tile);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const u32 q_tile = uniform(stage0 + at.stage * (STAGE_BYTES / 16)), do_tile = q_tile + K_BYTES / 16;
        int entries[2];
        for (int r = 0; r < 2; ++r) entries[r] = shares.has(list.number(step, row0 + 8 * r)) ? list.entry(step, row0 + 8 * r) : -1;
        wait_for_rows(shared, at);
        wgmma_fence();
        wgmma_a_bt<DK>(s, keys, q_tile);
        wgmma_commit();
        wgmma_a_bt<DV>(dp, values, do_tile);
        wgmma_commit();
        wgmma_wait<1>();  // p^T while dp^T is computed
        exponentiate(s, shared.lse[at.stage], x.p.scale_log2);
        const bool masked = step * TQ < list.segment.masked_entries;
        if (masked) shared.visible[at.stage].mask(x.p, s);
        wgmma_wait<0>();
        if (masked) shared.visible[at.stage].mask(x.p, dp);
        u32 weights[ROWS / 16][4], ds[ROWS / 16][4];
        begin_sums(dv, dk, weights, ds, s, dp, shared.delta[at.stage], do_tile, q_tile);
        if (!shares.any(step)) {
            wgmma_wait<0>();
            shared.steps.release(at.stage);
            continue;
        }
        store_operand(ds_tile, ds);  // while the sums are computed
        float dq[DK / 64][32];
        wgmma_fence();
        wgmma_at_b<KEYS / 16>(dq[0], ds_operand + TRANSPOSED, keys + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
        shared.steps.release(at.stage);
        if (DK > 64) {  // computed while the first columns are stored
            wgmma_fence();
            wgmma_at_b<KEYS / 16>(dq[DK / 64 - 1], ds_operand + TRANSPOSED, keys + (DK / 64 - 1) * PANEL / 16 + TRANSPOSED);
            wgmma_commit();
        }
        store_shares(list.segment.dq, dq[0], list.segment.scale, entries, row0, 0);
        wgmma_wait<0>();
        if (DK > 64) store_shares(list.segment.dq, dq[DK / 64 - 1], list.segment.scale, entries, row0, 64);
        named_barrier<128>(1);  // all warps have read ds
    }
    const bool alone = list.segment.alone, final = alone && x.to.final;
    const i64 key = list.first_key + threadIdx.x / 32 * 16;
    const GradientRows rows(list.segment.row + threadIdx.x / 32 * 16, (list.b * x.p.G + list.g) * x.p.S_kv + key, x.p.S_kv - key, final);
    rows.write<DK>(dk, final ? list.segment.scale : 1.0f, 0, alone ? x.to.sum_dk : x.to.part_dk, x.to.dk);
    rows.write<DV>(dv, 1.0f, 0, alone ? x.to.sum_dv : x.to.part_dv, x.to.dv);
}

extern "C" __global__ void __launch_bounds__(256, 2) block_gradients(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the tile's keys and values, ds, the stages
    __shared__ Shared shared;
    __shared__ Found found;
    __shared__ Shares shares;
    unsigned char *ds_tile = memory + K_BYTES + V_BYTES, *stages = ds_tile + PANEL;
    const int producer = threadIdx.x / 32 - 4;
    start_next_kernel();
    if (threadIdx.x < 32) found.find(x, blockIdx.x);
    if (threadIdx.x == 0) shared.init();
    zero_stages(stages);
    __syncthreads();
    if (found.entries <= 0) return;
    if (producer < 0) {
        reallocate_registers<1, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 2>(true);
        accumulate(Steps{x, found}, memory, ds_tile, stages, shared, shares);
        return;
    }
    reallocate_registers<1, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 2>(false);
    const Steps list{x, found};
    if (threadIdx.x == 128) produce_tile(list, memory, &shared.tile);
    __syncwarp();
    produce_rows(list, stages, shared, producer);
}
