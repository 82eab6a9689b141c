// dk and dv without atomics: a block takes a piece of the list of rows that chose one KV tile, in ascending order of rows.
//
// A matrix step takes PAIRS pairs of (entry, head), so that any number of heads fills it. The products are computed transposed: with the
// tile's keys as rows, s^T = k q^T and dp^T = v do^T leave p^T and ds^T where the next products dv += p^T do and dk += ds^T q read them,
// in registers, and every warp keeps 16 keys. A list of one piece is written as it is; of longer ones the float32 parts are added by
// sum_parts.cu in the order of the pieces. So the sum's order is fixed, whatever ran first.
//
//   KEY_WARPS     warps along the keys: a tile has 16 * KEY_WARPS keys
//   COLUMN_WARPS  1, or 2: two warps share 16 keys, and half of the columns of dk and dv each (wide heads: registers)
//   PAIRS         16 or 32
#include "key_to_rows.cuh"

struct Arguments {
    Problem p;
    const u16 *dout;           // [B,S,G,h,DV]
    const float *lse, *delta;  // [rows, h], lse natural
    const i64 *entries;        // sorted: bg * each + e, list after list (place.cu)
    const i64 *begins;         // [lists + 1]: where a list begins among the entries
    const i64 *pieces;         // [lists + 1]: pieces of the lists before
    const i64 *parts;          // [lists + 1]: pieces of the lists before that have several
    float *part_dk, *part_dv;  // [parts, WIDTH, DK], [parts, WIDTH, DV]
    u16 *dk, *dv;              // [B*G, S_kv, DK], [B*G, S_kv, DV]
    i64 stride_dob, stride_dos, stride_dog, stride_doh, lists, tiles, each, reach, piece;
};

constexpr int WIDTH = 16 * KEY_WARPS;
constexpr int THREADS = 32 * KEY_WARPS * COLUMN_WARPS;
constexpr int STAGE = PAIRS * (KP + VP);  // numbers of a buffer: the pairs' q, then their do
constexpr int DK_TILES = (DKP / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS, DV_TILES = (DVP / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS;
static_assert(PAIRS <= THREADS, "a thread describes a pair");

// What a matrix step knows of its pairs. Keys [low, high) of the tile are seen; none where the list has no such pair.
struct Pairs {
    i64 q[PAIRS], dout[PAIRS];  // offsets of their rows; q < 0: no such pair
    int low[PAIRS], high[PAIRS];
    float lse[PAIRS], delta[PAIRS];  // lse in base 2
};

// One pair, as a thread holds it between reading and writing it down.
struct Pair {
    i64 q = -1, dout = -1;
    int low = 0, high = 0;
    float lse = 0.0f, delta = 0.0f;
};

// e: the entry among those of its b and g; fewer than 2^31, because 64-bit divisions are slow.
DEVICE Pair pair_of(const Arguments &x, i64 b, i64 g, u32 e, i64 head, int tile_start) {
    const Problem &p = x.p;
    Pair pair;
    u32 reach = x.reach, a_row = static_cast<u32>(p.n) * reach;
    i64 s = e / a_row, row = (b * p.S + s) * p.G + g;
    int start, end;
    clamped_range(p, row * p.n + e % a_row / reach, row_limit(p, b, s), start, end);
    pair.q = s * p.stride_qs + head * p.stride_qh;
    pair.dout = s * x.stride_dos + head * x.stride_doh;
    pair.low = max(start - tile_start, 0);
    pair.high = min(end - tile_start, WIDTH);
    pair.lse = x.lse[row * p.h + head] * LOG2_E;
    pair.delta = x.delta[row * p.h + head];
    return pair;
}

DEVICE void write_down(Pairs &pairs, int i, const Pair &pair) {
    pairs.q[i] = pair.q;
    pairs.dout[i] = pair.dout;
    pairs.low[i] = pair.low;
    pairs.high[i] = pair.high;
    pairs.lse[i] = pair.lse;
    pairs.delta[i] = pair.delta;
}

template <int D, int PITCH>
DEVICE void copy_pairs(u16 *tile, const u16 *base, const i64 *offsets) {
    constexpr int PIECES = (PITCH - 8) / 8;
    for (int i = threadIdx.x; i < PAIRS * PIECES; i += THREADS) {
        int r = i / PIECES, column = i % PIECES * 8;
        bool exists = offsets[r] >= 0 && column < D;
        copy_eight(tile + r * PITCH + column, exists ? base + offsets[r] + column : base, exists);
    }
}

template <int D, int PITCH>
DEVICE void copy_tile(u16 *tile, const u16 *base, i64 stride, int first, i64 S_kv) {
    constexpr int PIECES = (PITCH - 8) / 8;
    for (int i = threadIdx.x; i < WIDTH * PIECES; i += THREADS) {
        int r = i / PIECES, column = i % PIECES * 8;
        bool exists = first + r < S_kv && column < D;
        copy_eight(tile + r * PITCH + column, exists ? base + (first + r) * stride + column : base, exists);
    }
}

// Write this warp's columns of 16 keys: to the part, or to the result where the list has but this piece.
template <int D, int N>
DEVICE void write(const float (&acc)[N][4], float factor, int half, bool final, float *part, u16 *result, i64 keys_left) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int key = lane / 4 + 8 * i, column = 8 * (half * N + j) + lane % 4 * 2;
            if (column >= D) continue;
            float low = acc[j][2 * i] * factor, high = acc[j][2 * i + 1] * factor;
            if (!final)
                *reinterpret_cast<float2 *>(part + key * D + column) = make_float2(low, high);
            else if (key < keys_left)
                *reinterpret_cast<u32 *>(result + key * D + column) = pack(low, high);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) dkdv_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];  // the tile's k and v, then two buffers of pairs
    __shared__ Pairs described[3];                 // of this step, of the next, whose rows are copied, and of the one after
    const Problem &p = x.p;
    i64 number = blockIdx.x;
    if (number >= x.pieces[x.lists]) return;
    i64 list = list_of(x.pieces, x.lists, number), piece = number - x.pieces[list];
    bool final = x.pieces[list + 1] - x.pieces[list] == 1;
    i64 begin = x.begins[list] + piece * x.piece, end = min(begin + x.piece, x.begins[list + 1]);
    i64 bg = list / x.tiles, b = bg / p.G, g = bg % p.G;
    int tile_start = static_cast<int>(list % x.tiles) * WIDTH;
    u32 h = p.h, pairs = static_cast<u32>(end - begin) * h, steps = (pairs + PAIRS - 1) / PAIRS;  // fewer than 2^31
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key0 = warp % KEY_WARPS * 16, half = warp / KEY_WARPS;
    float c = p.scale_log2;

    u16 *k_tile = memory, *v_tile = k_tile + WIDTH * KP, *buffers = v_tile + WIDTH * VP;
    const u16 *q_base = p.q + b * p.stride_qb + g * p.stride_qg, *do_base = x.dout + b * x.stride_dob + g * x.stride_dog;
    copy_tile<DK, KP>(k_tile, p.k + b * p.stride_kb + g * p.stride_kg, p.stride_kn, tile_start, p.S_kv);
    copy_tile<DV, VP>(v_tile, p.v + b * p.stride_vb + g * p.stride_vg, p.stride_vn, tile_start, p.S_kv);

    // A thread describes pair number threadIdx.x of every step. Its entry is read a step earlier: rows' addresses wait for it.
    bool describes = threadIdx.x < PAIRS;
    auto entry_at = [&](u32 step) {
        u32 pair = step * PAIRS + threadIdx.x;
        return describes && pair < pairs ? x.entries[begin + pair / h] - bg * x.each : -1;
    };
    auto describe = [&](u32 step, i64 entry) {
        return entry < 0 ? Pair() : pair_of(x, b, g, static_cast<u32>(entry), (step * PAIRS + threadIdx.x) % h, tile_start);
    };
    if (describes) {
        write_down(described[0], threadIdx.x, describe(0, entry_at(0)));
        write_down(described[1], threadIdx.x, describe(1, entry_at(1)));
    }
    i64 coming = entry_at(2);
    __syncthreads();
    auto copy_step = [&](u32 step) {
        u16 *buffer = buffers + step % 2 * STAGE;
        copy_pairs<DK, KP>(buffer, q_base, described[step % 3].q);
        copy_pairs<DV, VP>(buffer + PAIRS * KP, do_base, described[step % 3].dout);
        commit_copies();
    };
    copy_step(0);

    float dk[2 * DK_TILES][4] = {}, dv[2 * DV_TILES][4] = {};
    for (u32 step = 0; step < steps; ++step) {
        wait_copies<0>();
        __syncthreads();  // this step's rows and the next step's pairs are there, and the step before has been read
        if (step + 1 < steps) copy_step(step + 1);
        Pair next;
        if (describes) next = describe(step + 2, coming);
        coming = entry_at(step + 3);

        const Pairs &now = described[step % 3];
        const u16 *q_tile = buffers + step % 2 * STAGE, *do_tile = q_tile + PAIRS * KP;
        float s[PAIRS / 8][4] = {}, dp[PAIRS / 8][4] = {};
        add_products<KP, DKP / 16>(s, k_tile, key0, q_tile);
        add_products<VP, DVP / 16>(dp, v_tile, key0, do_tile);
        // Where nothing is seen, k and v may be NaN, and p and ds with them: the mask decides, not the product.
#pragma unroll
        for (int j = 0; j < PAIRS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int pair = 8 * j + lane % 4 * 2 + i % 2, key = key0 + lane / 4 + i / 2 * 8;
                bool seen = key >= now.low[pair] && key < now.high[pair];
                float probability = exp2_fast(s[j][i] * c - now.lse[pair]);
                dp[j][i] = seen ? probability * (dp[j][i] - now.delta[pair]) : 0.0f;
                s[j][i] = seen ? probability : 0.0f;
            }
        add_sums<VP, DVP>(dv, s, do_tile, half * 16 * DV_TILES);
        add_sums<KP, DKP>(dk, dp, q_tile, half * 16 * DK_TILES);
        if (describes) write_down(described[(step + 2) % 3], threadIdx.x, next);  // last read in the step before
    }

    i64 part = (x.parts[list] + piece) * WIDTH + key0, key = bg * p.S_kv + tile_start + key0, left = p.S_kv - tile_start - key0;
    write<DK>(dk, static_cast<float>(p.scale), half, final, x.part_dk + part * DK, x.dk + key * DK, left);
    write<DV>(dv, 1.0f, half, final, x.part_dv + part * DV, x.dv + key * DV, left);
}
