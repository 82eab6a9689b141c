// dq of the rows of a unit on Hopper, from their partial sums (block_gradients.cu) and from the tiles of keys that
// adjacent tokens share, as in join_partials.cu.
//
//   p = 2^(c q k^T - lse),  ds = p * (do v^T - delta),  acc = sum ds k                     over the shared tiles
//   dq = scale * acc + sum_i dq_i
//
// Grid: one CTA per 64 rows of the unit (joined_rows.cuh).
// Masks: ds of masked keys is replaced by 0, not multiplied by 0; keys that no row sees are zeroed.
#include "joined_rows.cuh"

struct Maps {
    TensorMap q, d_o, k, v;  // q, do: boxes of TQ tokens
};
struct Arguments : Maps, UnitArguments {
    const u16 *part_dq;          // [pairs, section, EACH, H, DK]
    const float *lse, *delta;    // [B,S,G,H], lse natural
    u16 *dq;                     // [B,S,G,H,DK]
};

DEVICE void differentiate_shared(const Arguments &x, const Tokens &tokens, unsigned char *memory, Barriers &full, float (&acc)[DK / 2]) {
    const u32 q = uniform(operand(shared_address(memory))), keys = q + K_BYTES / 16;
    const u32 d_out = keys + K_BYTES / 16, values = d_out + V_BYTES / 16;
    unsigned char *k_tile = memory + K_BYTES, *do_tile = k_tile + K_BYTES, *v_tile = do_tile + V_BYTES;
    SharedTiles<Arguments> tiles(x, tokens, k_tile, v_tile, full);
    if (!tiles.left) return;
    int key = tiles.next_key();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&full.rows, K_BYTES + V_BYTES);
        tma_load_row_tile<DK>(memory, &x.q, &full.rows, tiles.g, static_cast<int>(tokens.s), tiles.b);
        tma_load_row_tile<DV>(do_tile, &x.d_o, &full.rows, tiles.g, static_cast<int>(tokens.s), tiles.b);
        tiles.load_keys(key);
        tiles.load_values(key);
    }
    float lse[2], delta[2];
    UNROLL for (int r = 0; r < 2; ++r) {
        const int token = row_of_tile(r) / H;
        const i64 index = tokens.index(x.p, min(token, tokens.count - 1)) * H + row_of_tile(r) % H;
        lse[r] = token < tokens.count ? x.lse[index] * LOG2_E : infinity();
        delta[r] = x.delta[index];
    }
    mbarrier_wait(&full.rows, 0);
    for (int parity = 0; key >= 0; parity ^= 1) {
        const int coming = tiles.next_key();
        float s[KEYS / 2], dp[KEYS / 2];
        u32 ds[KEYS / 16][4];
        mbarrier_wait(&full.k, parity);
        mbarrier_wait(&full.v, parity);
        wgmma_fence();
        wgmma_a_bt<DK>(s, q, keys);
        wgmma_a_bt<DV>(dp, d_out, values);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all have read the values
        if (coming >= 0 && threadIdx.x == 0) tiles.load_values(coming);
        logit_gradients(s, dp, static_cast<float>(x.p.scale_log2), lse, delta);
        tokens.mask(x.p, s, key, 0.0f);
        as_operand(ds, s);
        tokens.zero_unseen(k_tile, K_BYTES, key);
        wgmma_fence();
        wgmma_add_a_b<DK>(acc, ds, keys + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all have read the keys
        if (coming >= 0 && threadIdx.x == 0) tiles.load_keys(coming);
        key = coming;
    }
}

// Add the partial sums of this thread's two rows to acc. entries: those of each row, as bits.
DEVICE void add_shares(PartialLoads<DK> &loads, const u64 (&entries)[2], float (&acc)[DK / 2]) {
    const int rounds = rounds_of(entries[0], entries[1]);
    PipelineState<RING> at;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i, at.next()) {
        UNROLL for (int r = 0; r < 2; ++r) {
            const unsigned char *row = loads.row(at, r);
            if (i < __popcll(entries[r])) add_partial(acc, r, 1.0f, row);
        }
        loads.release(at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) join_shares(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q, a tile's keys, do, its values; then the warps' stages
    __shared__ Barriers full;
    start_next_kernel();
    const Tokens tokens(x);
    if (threadIdx.x == 0) full.init();
    __syncthreads();
    float acc[DK / 2];
    UNROLL for (int i = 0; i < DK / 2; ++i) acc[i] = 0.0f;
    differentiate_shared(x, tokens, memory, full, acc);
    const float scale[2] = {static_cast<float>(x.p.scale), static_cast<float>(x.p.scale)};
    scale_rows(acc, scale);
    wait_for_kernel_ahead();  // which writes the shares
    PartialLoads<DK> loads(x, tokens, x.part_dq, memory, full);
    adjacent_columns(acc);
    const u64 entries[2] = {listed_entries(x, tokens, row_of_tile(0)), listed_entries(x, tokens, row_of_tile(1))};
    add_shares(loads, entries, acc);
    UNROLL for (int r = 0; r < 2; ++r) {
        const int token = row_of_tile(r) / H;
        if (token < tokens.count) write_row(x.dq + (tokens.index(x.p, token) * H + row_of_tile(r) % H) * DK, acc, r, 1.0f);
    }
}
