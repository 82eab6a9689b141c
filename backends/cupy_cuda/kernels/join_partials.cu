// o and lse of the rows of a unit on Hopper, from their partials (block_partials.cu) and from the tiles of keys that
// adjacent tokens share.
//
//   s = c q k^T,  p = 2^(s - m),  acc = sum p v,  l = sum p                     over the shared tiles  (softmax.cuh)
//   w_i = 2^(lse_i - m),  o = (acc + sum_i w_i o_i) / (l + sum_i w_i),  lse = m + log2(l + sum_i w_i)
//
// Partials are most of the bytes that cuda-block moves. A tile that all of TQ adjacent tokens selected takes two
// products here and no memory; with random selections these are the forced blocks, 3 of 16.
// Grid: one CTA per 64 rows of the unit (joined_rows.cuh).
// Masks: a row's limit cuts some shared tiles; values that no row sees are zeroed, because 0 * NaN is NaN.
#include "joined_rows.cuh"

struct Maps {
    TensorMap q, k, v;  // q: boxes of TQ tokens
};
struct Arguments : Maps, UnitArguments {
    const u16 *part_o;           // [pairs, section, EACH, H, DV]
    const float *part_lse;       // [pairs, section, EACH, H], in base 2
    u16 *o;                      // [B,S,G,H,DV]
    float *lse;                  // [B,S,G,H]
    const float *factors;        // JOINED 2: of keys and values [pages, G, 2]
};

DEVICE void attend_shared(const Arguments &x, const Tokens &tokens, unsigned char *memory, Barriers &full, float (&acc)[DV / 2],
                          OnlineSoftmax &softmax) {
    const u32 q = uniform(operand(shared_address(memory))), keys = q + K_BYTES / 16, values = keys + K_BYTES / 16;
    SharedTiles<Arguments> tiles(x, tokens, memory + K_BYTES, memory + 2 * K_BYTES, full);
    if (!tiles.left) return;
    int key = tiles.next_key();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&full.rows, K_BYTES);
        tma_load_row_tile<DK>(memory, &x.q, &full.rows, tiles.g, static_cast<int>(tokens.s), tiles.b);
        tiles.load_keys(key);
        tiles.load_values(key);
    }
    mbarrier_wait(&full.rows, 0);
    for (int parity = 0; key >= 0; parity ^= 1) {
        const int coming = tiles.next_key();
        float s[KEYS / 2], alpha[2];
        u32 p[KEYS / 16][4];
        mbarrier_wait(&full.k, parity);
        wgmma_fence();
        wgmma_a_bt<DK>(s, q, keys);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all have read the keys
        if (coming >= 0 && threadIdx.x == 0) tiles.load_keys(coming);
        const PageFactors factors = page_factors(x.factors, x.p, key, tiles.g);
        if (JOINED == 2)
            for (float &logit : s) logit *= factors.k;
        tokens.mask(x.p, s, key, -infinity());
        UNROLL for (int r = 0; r < 2; ++r) {
            alpha[r] = softmax.raise(r, quad_max(row_max(s, r)));
            softmax.exponentiate(s, r, true);
        }
        scale_rows(acc, alpha);
        if (JOINED == 2)
            for (float &weight : s) weight *= factors.v;
        as_operand(p, s);
        mbarrier_wait(&full.v, parity);
        tokens.zero_unseen(memory + 2 * K_BYTES, V_BYTES, key);
        wgmma_fence();
        wgmma_add_a_b<DV>(acc, p, values + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all have read the values
        if (coming >= 0 && threadIdx.x == 0) tiles.load_values(coming);
        key = coming;
    }
}

struct PartialTotals {
    const float *lse;  // of entry 0
    u64 entries;       // not added yet
    DEVICE PartialTotals(const Arguments &x, const Tokens &tokens, int row)
        : lse(x.part_lse + first_partial(x, tokens, row)), entries(listed_entries(x, tokens, row)) {}
    // Return the largest of all and `top`; a lane reads a quarter of them, four at a time.
    DEVICE float largest(float top) const {
        UNROLL for (int first = 0; first < EACH; first += 16) {
            float found[4];
            UNROLL for (int i = 0; i < 4; ++i) {
                const int entry = first + 4 * i + threadIdx.x % 4;
                found[i] = entry < EACH && entries >> entry & 1 ? lse[entry * H] : -infinity();
            }
            top = fmaxf(fmaxf(top, fmaxf(found[0], found[1])), fmaxf(found[2], found[3]));
        }
        return quad_max(top);
    }
    // Return that of the next entry; -inf if there is none.
    DEVICE float next() {
        if (!entries) return -infinity();
        const int entry = __ffsll(entries) - 1;
        entries &= entries - 1;
        return lse[entry * H];
    }
};

// Add the partials of this thread's two rows, relative to m, to acc and l.
DEVICE void add_partials(PartialLoads<DV> &loads, PartialTotals (&totals)[2], float (&acc)[DV / 2], const float (&m)[2], float (&l)[2]) {
    const int rounds = rounds_of(totals[0].entries, totals[1].entries);
    PipelineState<RING> at;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i, at.next()) {
        float weight[2];
        UNROLL for (int r = 0; r < 2; ++r) weight[r] = exp2_fast(totals[r].next() - m[r]);
        UNROLL for (int r = 0; r < 2; ++r) {
            const unsigned char *row = loads.row(at, r);
            if (weight[r] == 0.0f) continue;  // without a partial, memory may hold anything
            l[r] += weight[r];
            add_partial(acc, r, weight[r], row);
        }
        loads.release(at);
    }
}

DEVICE void write_rows(const Arguments &x, const Tokens &tokens, const float (&acc)[DV / 2], const float (&m)[2], const float (&l)[2]) {
    UNROLL for (int r = 0; r < 2; ++r) {
        const int row = row_of_tile(r);
        const RowTotals totals(1.0f, m[r], l[r]);
        if (row / H >= tokens.count) continue;
        const i64 index = tokens.index(x.p, row / H) * H + row % H;
        if (threadIdx.x % 4 == 0) x.lse[index] = totals.lse * LN_2;
        write_row(x.o + index * DV, acc, r, totals.scale);
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
    UNROLL for (int i = 0; i < DV / 2; ++i) acc[i] = 0.0f;
    attend_shared(x, tokens, memory, full, acc, softmax);
    wait_for_kernel_ahead();  // which writes the partials
    PartialLoads<DV> loads(x, tokens, x.part_o, memory, full);
    adjacent_columns(acc);
    PartialTotals totals[2] = {{x, tokens, row_of_tile(0)}, {x, tokens, row_of_tile(1)}};
    UNROLL for (int r = 0; r < 2; ++r) {
        const float own = fmaxf(softmax.m[r] * softmax.c, LOWEST);  // not -inf, however large the scale is
        m[r] = totals[r].largest(own);
        alpha[r] = exp2_fast(own - m[r]);
        l[r] = quad_sum(softmax.l[r]) * alpha[r];
    }
    scale_rows(acc, alpha);
    add_partials(loads, totals, acc, m, l);
    write_rows(x, tokens, acc, m, l);
}
