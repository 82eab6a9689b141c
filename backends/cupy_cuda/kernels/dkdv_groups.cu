// dk and dv on Hopper, without atomics: a block takes a piece of the list of rows that chose one KV tile of 64 keys (lists.py).
//
// A step is 64 rows of the matrix unit: TQ = 64 / H listed tokens with their heads, whose q and do come by bulk copies, a token each, or
// where those would be small, by three warps, 16 bytes a lane. The products are transposed, keys as rows, so that p^T and ds^T come out in
// the registers from which dv += p^T do and dk += ds^T q read them. Four warps compute; a multiprocessor has two such blocks, so that one
// computes p and ds, begins or ends while the other multiplies. What becomes of the sums is as in dkdv_tiles.cu.
//
//   H       heads a group of queries
//   STAGES  steps under way
#include "tma.cuh"
#include "key_to_rows.cuh"

constexpr int TQ = 64 / H, KEYS = 64, ROWS = 64;
constexpr bool BULK = H >= 8;
constexpr int COPIERS = BULK ? 1 : 3;  // warps
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;  // of keys and values; of q and do

constexpr int COMPUTING = 224, COPYING = 32;  // registers a thread

struct Arguments {
    TensorMap q, d_o, k, v;
    Problem p;
    const float *lse, *delta;  // [rows, H], lse natural
    const i64 *entries;        // sorted: bg * each + e, list after list (place.cu)
    const i64 *begins;         // [lists + 1]: where a list begins among the entries
    const i64 *pieces;         // [lists + 1]: pieces of the lists before
    const i64 *parts;          // [lists + 1]: pieces of the lists before that have several
    float *part_dk, *part_dv;  // [parts, KEYS, DK], [parts, KEYS, DV]
    u16 *dk, *dv;              // [B*G, S_kv, DK], [B*G, S_kv, DV]
    i64 lists, tiles, each, reach, piece;
    const u16 *d_out;  // do [B,S,G,h,DV] of any strides
    i64 stride_dob, stride_dos, stride_dog, stride_doh;
};

struct Shared {
    u64 full[STAGES], empty[STAGES], tile;
    float lse[STAGES][ROWS], delta[STAGES][ROWS];
    int limit[STAGES][ROWS];  // one past the last key of the tile that the row sees; 0 where the list has no such row
};

// What a block works on.
struct Piece {
    i64 list, number, begin, end, b, g, bg;
    int first_key, steps;
    bool final;  // the list's only piece
    DEVICE Piece(const Arguments &x, i64 index) {
        list = list_of(x.pieces, x.lists, index);
        number = index - x.pieces[list];
        final = x.pieces[list + 1] - x.pieces[list] == 1;
        begin = x.begins[list] + number * x.piece;
        end = min(begin + x.piece, x.begins[list + 1]);
        bg = list / x.tiles;
        b = bg / x.p.G;
        g = bg % x.p.G;
        first_key = static_cast<int>(list % x.tiles) * KEYS;
        steps = static_cast<int>((end - begin + TQ - 1) / TQ);
    }
    // The row of listed token number i of a step; S, which is past the rows, where there is none.
    DEVICE int row(const Arguments &x, int step, int i) const {
        i64 at = begin + static_cast<i64>(step) * TQ + i;
        if (i >= TQ || at >= end) return static_cast<int>(x.p.S);
        return static_cast<u32>(x.entries[at] - bg * x.each) / static_cast<u32>(x.p.n * x.reach);  // below 2^31; 64-bit divisions are slow
    }
};

// One lane: the tile's keys and values.
DEVICE void copy_tile(const Arguments &x, const Piece &piece, unsigned char *k_tile, Shared &shared) {
    const int b = static_cast<int>(piece.b), g = static_cast<int>(piece.g);
    arrive_expecting(&shared.tile, K_BYTES + V_BYTES);
    for (int c = 0; c < DK; c += 64) copy_keys_box(k_tile + c / 64 * PANEL, &x.k, &shared.tile, c, piece.first_key, g, b);
    for (int c = 0; c < DV; c += 64) copy_keys_box(k_tile + K_BYTES + c / 64 * PANEL, &x.v, &shared.tile, c, piece.first_key, g, b);
}

// One warp: q and do of every step, a token a lane.
DEVICE void copy_tokens(const Arguments &x, const Piece &piece, unsigned char *stages, Shared &shared) {
    const int lane = threadIdx.x % 32, b = static_cast<int>(piece.b), g = static_cast<int>(piece.g);
    int coming = piece.row(x, 0, lane);
    for (int step = 0; step < piece.steps; ++step) {
        const int stage = step % STAGES, s = coming;
        coming = piece.row(x, step + 1, lane);  // read a step ahead: the rows' addresses wait for it
        wait(&shared.empty[stage], step / STAGES % 2 ^ 1);
        unsigned char *q_tile = stages + stage * STAGE_BYTES + lane * H * 128, *do_tile = q_tile + K_BYTES;
        if (lane == 0) arrive_expecting(&shared.full[stage], TQ * H * 2 * (DK + DV));
        __syncwarp();
        if (lane >= TQ) continue;
        for (int c = 0; c < DK; c += 64) copy_rows_box(q_tile + c / 64 * PANEL, &x.q, &shared.full[stage], c, g, s, b);
        for (int c = 0; c < DV; c += 64) copy_rows_box(do_tile + c / 64 * PANEL, &x.d_o, &shared.full[stage], c, g, s, b);
    }
}

// One of the copying warps: four heads of a token at once, eight lanes a row, of every COPIERS-th four; zeros for tokens that do not exist.
// A step is announced once it is there and the next one's copies have begun.
DEVICE void copy_pieces(const Arguments &x, const Piece &piece, unsigned char *stages, Shared &shared, int copier) {
    constexpr int FOURS = (H + 3) / 4;  // of a token
    const int lane = threadIdx.x % 32, column = lane % 8, head0 = lane / 8;
    const u16 *q = x.p.q + piece.b * x.p.stride_qb + piece.g * x.p.stride_qg + head0 * x.p.stride_qh + column * 8;
    const u16 *d_out = x.d_out + piece.b * x.stride_dob + piece.g * x.stride_dog + head0 * x.stride_doh + column * 8;
    int coming = piece.row(x, 0, lane);
    for (int step = 0; step < piece.steps; ++step) {
        const int stage = step % STAGES;
        const int row_of_lane = coming < x.p.S ? coming : -1;  // negative where there is no such token
        coming = piece.row(x, step + 1, lane);
        wait(&shared.empty[stage], step / STAGES % 2 ^ 1);
        __syncwarp();
#pragma unroll 1
        for (int four = copier; four < TQ * FOURS; four += COPIERS) {
            const int token = four / FOURS, head = four % FOURS * 4 + head0;
            const int row = __shfl_sync(ALL, row_of_lane, token);
            if (H % 4 && head >= H) continue;
            const bool exists = row >= 0;
            const u16 *q_row = exists ? q + row * x.p.stride_qs + four % FOURS * 4 * x.p.stride_qh : q;
            const u16 *do_row = exists ? d_out + row * x.stride_dos + four % FOURS * 4 * x.stride_doh : d_out;
            unsigned char *to = stages + stage * STAGE_BYTES + swizzled(token * H + head, column);
#pragma unroll
            for (int c = 0; c < DK; c += 64) copy_eight(reinterpret_cast<u16 *>(to + c / 64 * PANEL), q_row + c, exists);
#pragma unroll
            for (int c = 0; c < DV; c += 64) copy_eight(reinterpret_cast<u16 *>(to + K_BYTES + c / 64 * PANEL), do_row + c, exists);
        }
        commit_copies();
        if (step) {
            wait_copies<1>();
            publish_writes();
            __syncwarp();
            if (lane == 0) arrive(&shared.full[(step - 1) % STAGES]);
        }
    }
    wait_copies<0>();
    publish_writes();
    __syncwarp();
    if (lane == 0) arrive(&shared.full[(piece.steps - 1) % STAGES]);
}

// One warp: lse and delta of two rows a lane, and where they end.
DEVICE void copy_statistics(const Arguments &x, const Piece &piece, Shared &shared) {
    const int lane = threadIdx.x % 32;
    int coming[2];
    for (int i = 0; i < 2; ++i) coming[i] = piece.row(x, 0, (lane + 32 * i) / H);
    for (int step = 0; step < piece.steps; ++step) {
        const int stage = step % STAGES;
        const int rows[2] = {coming[0], coming[1]};
        for (int i = 0; i < 2; ++i) coming[i] = piece.row(x, step + 1, (lane + 32 * i) / H);
        wait(&shared.empty[stage], step / STAGES % 2 ^ 1);
        for (int i = 0; i < 2; ++i) {
            const int row = lane + 32 * i;
            const bool exists = rows[i] < x.p.S;
            const i64 at = exists ? ((piece.b * x.p.S + rows[i]) * x.p.G + piece.g) * H + row % H : 0;
            copy_four(&shared.lse[stage][row], x.lse + at, exists);
            copy_four(&shared.delta[stage][row], x.delta + at, exists);
            shared.limit[stage][row] = exists ? row_limit(x.p, piece.b, rows[i]) - piece.first_key : 0;
        }
        arrive_when_copied(&shared.full[stage]);
        arrive(&shared.full[stage]);
    }
}

// d = keys of the tile times a step's rows: 64 by 64 numbers that have COLUMNS columns in common, operands in panels.
template <int COLUMNS>
DEVICE void begin_products(float (&d)[ROWS / 2], u32 keys, u32 rows) {
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k)
        wgmma_shared(d, descriptor(keys + (k / 4 * PANEL + k % 4 * 32) / 16), descriptor(rows + (k / 4 * PANEL + k % 4 * 32) / 16), k > 0);
}

// acc (64 keys by COLUMNS) += a (64 keys by 64 rows) times 64 rows of COLUMNS columns in panels, an operand.
template <int COLUMNS>
DEVICE void begin_sum(float (&acc)[COLUMNS / 2], const u32 (&a)[ROWS / 16][4], u32 x) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) wgmma_registers(acc, a[k], descriptor(x + k * 2048 / 16));
}

template <int COLUMNS>
DEVICE void write(const float (&acc)[COLUMNS / 2], float factor, bool final, float *part, u16 *result, i64 keys_left) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
        int key = threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
        float low = acc[i] * factor, high = acc[i + 1] * factor;
        if (!final)
            *reinterpret_cast<float2 *>(part + key * COLUMNS + column) = make_float2(low, high);
        else if (key < keys_left)
            *reinterpret_cast<u32 *>(result + key * COLUMNS + column) = pack(low, high);
    }
}

DEVICE void accumulate(const Arguments &x, const Piece &piece, unsigned char *k_tile, unsigned char *stages, Shared &shared) {
    const Problem &p = x.p;
    const int lane = threadIdx.x % 32, key0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float c = p.scale_log2;
    const u32 keys = uniform(operand(shared_address(k_tile))), values = keys + K_BYTES / 16, stage0 = uniform(operand(shared_address(stages)));
    // Of rows in order only the first KEYS entries of a list can stand within the tile.
    const i64 masked = p.q_pos ? piece.steps : (x.begins[piece.list] + KEYS - piece.begin + TQ - 1) / TQ;
    float dk[DK / 2], dv[DV / 2], s[ROWS / 2], dp[ROWS / 2];
#pragma unroll
    for (int i = 0; i < DK / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) dv[i] = 0.0f;
    wait(&shared.tile, 0);
    for (int step = 0; step < piece.steps; ++step) {
        const int stage = step % STAGES;
        const u32 q_tile = uniform(stage0 + stage * (STAGE_BYTES / 16)), do_tile = q_tile + K_BYTES / 16;
        wait(&shared.full[stage], step / STAGES % 2);
        wgmma_begin();
        begin_products<DK>(s, keys, q_tile);
        begin_products<DV>(dp, values, do_tile);
        wgmma_end();
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            float2 lse = *reinterpret_cast<const float2 *>(&shared.lse[stage][8 * j + lane % 4 * 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[4 * j + i] = exp2_fast(s[4 * j + i] * c - (i % 2 ? lse.y : lse.x) * LOG2_E);
        }
        if (step < masked) {  // where nothing is seen, k and v may be NaN, and p and ds with them
#pragma unroll
            for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (key0 + i / 2 * 8 >= shared.limit[stage][8 * j + lane % 4 * 2 + i % 2]) s[4 * j + i] = dp[4 * j + i] = 0.0f;
        }
        u32 weights[ROWS / 16][4], slopes[ROWS / 16][4];  // p and ds, rounded: operands
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            float2 delta = *reinterpret_cast<const float2 *>(&shared.delta[stage][8 * j + lane % 4 * 2]);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                float low = s[4 * j + i], high = s[4 * j + i + 1];
                weights[j / 2][j % 2 * 2 + i / 2] = pack(low, high);
                slopes[j / 2][j % 2 * 2 + i / 2] = pack(low * (dp[4 * j + i] - delta.x), high * (dp[4 * j + i + 1] - delta.y));
            }
        }
        wgmma_begin();
        begin_sum<DV>(dv, weights, do_tile + ACROSS);
        begin_sum<DK>(dk, slopes, q_tile + ACROSS);
        wgmma_end();
        wgmma_wait<0>();
        if (lane == 0) arrive(&shared.empty[stage]);
    }

    i64 part = (x.parts[piece.list] + piece.number) * KEYS, key = piece.bg * p.S_kv + piece.first_key, left = p.S_kv - piece.first_key;
    write<DK>(dk, static_cast<float>(p.scale), piece.final, x.part_dk + part * DK, x.dk + key * DK, left);
    write<DV>(dv, 1.0f, piece.final, x.part_dv + part * DV, x.dv + key * DV, left);
}

extern "C" __global__ void __launch_bounds__(256, 2) dkdv_groups(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the tile's keys and values, the stages
    __shared__ Shared shared;
    if (blockIdx.x >= x.pieces[x.lists]) return;
    unsigned char *stages = memory + K_BYTES + V_BYTES;
    const int warp = threadIdx.x / 32 - 4;  // of those that copy
    const Piece piece(x, blockIdx.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.full[i], COPIERS + 32 + 32);  // rows; statistics copied, and written
            barrier_init(&shared.empty[i], 4);                 // a lane of every warp
        }
        barrier_init(&shared.tile, 1);
        barriers_are_ready();
    }
    if (TQ * H < ROWS)  // rows that no token fills stay zero: p = 1 there, which 0 * NaN would not cancel
        for (int i = threadIdx.x; i < STAGES * STAGE_BYTES / 16; i += blockDim.x) *reinterpret_cast<uint4 *>(stages + i * 16) = make_uint4(0, 0, 0, 0);
    publish_writes();
    __syncthreads();
    if (warp >= 0) {
        share_registers<1, COMPUTING, COPYING, 2>(false);
        if (threadIdx.x == 128) copy_tile(x, piece, memory, shared);
        __syncwarp();
        if (warp == 1) copy_statistics(x, piece, shared);
        else if (!BULK) copy_pieces(x, piece, stages, shared, warp ? warp - 1 : 0);
        else if (warp == 0) copy_tokens(x, piece, stages, shared);
    } else {
        share_registers<1, COMPUTING, COPYING, 2>(true);
        accumulate(x, piece, memory, stages, shared);
    }
}
