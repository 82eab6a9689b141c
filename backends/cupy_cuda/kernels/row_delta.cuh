// delta = sum(do * o) - dlse of a thread's two rows of a tile of tokens, of which dq_tiles.cu and dq_gather.cu make ds.
#pragma once
#include "token_tiles.cuh"

// sum + a * b of two elements each.
DEVICE float dot2(u32 a, u32 b, float sum) {
    sum += to_float(static_cast<u16>(a)) * to_float(static_cast<u16>(b));
    return sum + to_float(static_cast<u16>(a >> 16)) * to_float(static_cast<u16>(b >> 16));
}

struct RowDelta {
    const RowPair &rows;
    const TokenTile &tile;
    const int consumer;
    float sum[2] = {0.0f, 0.0f};

    DEVICE RowDelta(const RowPair &pair, const TokenTile &of, int number) : rows(pair), tile(of), consumer(number) {}
    // Columns [16 k, 16 k + 16) of do and o, as operands.
    DEVICE void add(const u32 (&d_out)[4], const u32 (&o)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i % 2] = dot2(d_out[i], o[i], sum[i % 2]);
    }
    // The same, with o from memory, [B,S,G,H,DV].
    DEVICE void add(const u32 (&d_out)[4], const u16 *o, int k) {
        u32 own[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16 *row = o + RowPair::index(rows.problem, tile, consumer, i % 2) * DV;
            own[i] = rows.bit[i % 2] ? *reinterpret_cast<const u32 *>(row + k * 16 + i / 2 * 8 + threadIdx.x % 4 * 2) : 0u;
        }
        add(d_out, own);
    }
    // Their delta, which goes to memory, too: [B,S,G,H], as dlse, which may be null.
    DEVICE void finish(float (&delta)[2], const float *dlse, float *to) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i64 row = RowPair::index(rows.problem, tile, consumer, r);
            delta[r] = quad_sum(sum[r]);
            if (dlse && rows.bit[r]) delta[r] -= dlse[row];
            if (rows.bit[r] && threadIdx.x % 4 == 0) to[row] = delta[r];
        }
    }
};
