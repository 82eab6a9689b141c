// Tiles of adjacent tokens on Hopper: what the forward pass and dq share. The keys and values of the union of a tile's blocks (union_of.cu)
// travel once for all groups of warps of a block, STAGES steps of 64 keys ahead.
//
// A group of four warps has 64 rows of the matrix unit, TQ = 64 / H tokens with their heads. Every group waits for every step, and takes
// part in those that one of its tokens chose. Blocks of threads stay and take tile after tile. Of a tile's list come first
//   cut blocks    the causal clamp, or the end of the cache, cuts them for some row: they need a mask for every element, and what no row
//                 may see is made zero, since p = 0 would not cancel NaN
//   whole blocks  all rows of the tile see them to their last key
//
//   H        heads a group of queries (2 to 64)
//   GROUPS   groups of warps that compute
//   STAGES   steps under way
//   BLOCK    keys of a block, a multiple of 64
#pragma once
#include "common.cuh"
#include "hopper.cuh"

constexpr int TQ = 64 / H, TOKENS = GROUPS * TQ;  // of a group, of a block
constexpr int KEYS = 64, STEPS = BLOCK / KEYS;
constexpr int PANEL = 64 * 128;  // bytes of 64 rows of 64 columns
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int COMPUTING = GROUPS == 3 ? 152 : 232, COPYING = GROUPS == 3 ? 56 : 40;  // registers a thread

// The lists of a plan.
struct Plan {
    const int *blocks;   // [tiles of all * capacity]: the union of a tile's blocks, whole ones first
    const u64 *members;  // which of the tile's tokens chose each
    const int2 *counts;  // whole blocks, all blocks
    i64 tiles, capacity, all;  // tiles of a batch entry and group, blocks of a list at most, tiles

    // Where entry e of a tile, counted in the order of steps, stands in its list.
    DEVICE i64 place(u32 tile, int2 count, int e) const {
        int cut = count.y - count.x;
        return tile * capacity + (e < cut ? count.x + e : e - cut);
    }
};

// A tile of tokens: late ones, which see the most blocks, first.
struct Tile {
    int i, b, g;
    u32 number;
    DEVICE Tile(u32 turn, u32 tiles, u32 G) {
        i = tiles - 1 - turn % tiles;
        b = turn / tiles / G;
        g = turn / tiles % G;
        number = turn / tiles * tiles + i;
    }
};

// Steps go round the stages: which one, and the parity of its barriers.
struct Ring {
    int stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Barriers of the steps, and which tokens take part in each.
struct Steps {
    u64 full[STAGES], empty[STAGES], raw;
    u32 takes_part[STAGES][GROUPS];  // bit r: token r of the group chose the step's block

    DEVICE void init() {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], 4 * GROUPS);  // a lane of every warp
        }
        barrier_init(&raw, 1);
    }
};

// One past the last key that some row of the tile may see.
DEVICE int last_seen(const Problem &p, const Tile &tile) {
    int seen = 0;
    for (int r = threadIdx.x % 32; r < TOKENS; r += 32) {
        i64 s = static_cast<i64>(tile.i) * TOKENS + r;
        if (s < p.S) seen = max(seen, row_limit(p, tile.b, s));
    }
    return __reduce_max_sync(ALL, seen);
}

// One warp: the keys and values of every step, for all groups. MEND_KEYS: keys that no row may see are made zero, too.
template <bool MEND_KEYS>
DEVICE void copy_steps(const TensorMap &k_map, const TensorMap &v_map, const Problem &p, const Plan &plan, unsigned char *stages, Steps &shared) {
    int lane = threadIdx.x % 32, raw_parity = 0;
    Ring ring;
    for (u32 turn = blockIdx.x; turn < plan.all; turn += gridDim.x) {
        Tile tile(turn, plan.tiles, p.G);
        int2 counts = plan.counts[tile.number];
        int seen = last_seen(p, tile), cut = counts.y - counts.x, block = 0;
        u64 members = 0;
        for (int e = 0; e < counts.y; ++e) {
            if (e % 32 == 0 && e + lane < counts.y) {
                i64 at = plan.place(tile.number, counts, e + lane);
                block = plan.blocks[at];
                members = plan.members[at];
            }
            int first = __shfl_sync(ALL, block, e % 32) * BLOCK;
            u64 chosen = __shfl_sync(ALL, members, e % 32);
            for (int key = first; key < first + BLOCK; key += KEYS, ring.next()) {
                unsigned char *k_tile = stages + ring.stage * STAGE_BYTES, *v_tile = k_tile + K_BYTES;
                bool mend = e < cut && key + KEYS > seen;
                u64 *landed = mend ? &shared.raw : &shared.full[ring.stage];
                wait(&shared.empty[ring.stage], ring.parity ^ 1);
                if (lane < GROUPS) shared.takes_part[ring.stage][lane] = static_cast<u32>(chosen >> lane * TQ) & static_cast<u32>((1ull << TQ) - 1);
                __syncwarp();
                if (lane == 0) {
                    arrive_expecting(landed, STAGE_BYTES);
#pragma unroll
                    for (int c = 0; c < DK; c += 64) copy_keys_box(k_tile + c / 64 * PANEL, &k_map, landed, c, key, tile.g, tile.b);
#pragma unroll
                    for (int c = 0; c < DV; c += 64) copy_keys_box(v_tile + c / 64 * PANEL, &v_map, landed, c, key, tile.g, tile.b);
                }
                if (mend) {
                    wait(landed, raw_parity);
                    raw_parity ^= 1;
                    unsigned char *mended = MEND_KEYS ? k_tile : v_tile;
                    for (int i = lane; i < (k_tile + STAGE_BYTES - mended) / 16; i += 32)  // rows are whole: where their pieces stand does not matter
                        if (key + i / 8 % KEYS >= seen) *reinterpret_cast<uint4 *>(mended + i * 16) = make_uint4(0, 0, 0, 0);
                    publish_writes();
                    __syncwarp();
                    if (lane == 0) arrive(&shared.full[ring.stage]);
                }
            }
        }
    }
}

// One warp for each group: a tile of its rows of one or two tensors [B,S,G,H,D], as soon as the tile before needs them no more.
template <int COLUMNS, int MORE>
DEVICE void copy_rows(const TensorMap &map, const TensorMap &more, const Problem &p, const Plan &plan, unsigned char *to, u64 *full, u64 *empty, int group) {
    int parity = 0;
    for (u32 turn = blockIdx.x; turn < plan.all; turn += gridDim.x, parity ^= 1) {
        Tile tile(turn, plan.tiles, p.G);
        wait(empty, parity ^ 1);
        if (threadIdx.x % 32) continue;
        const int s = tile.i * TOKENS + group * TQ;
        arrive_expecting(full, (COLUMNS + MORE) / 64 * TQ * H * 128);
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 64) copy_rows_box(to + c / 64 * PANEL, &map, full, c, tile.g, s, tile.b);
#pragma unroll
        for (int c = 0; c < MORE; c += 64) copy_rows_box(to + (COLUMNS + c) / 64 * PANEL, &more, full, c, tile.g, s, tile.b);
    }
}

enum Found { TAKES_PART, GIVE_BACK, END };

// A group's way through the steps of a tile.
struct Way {
    Steps &shared;
    const int group;
    Ring ring;
    int step, total, held, held_stage;  // held: a step whose stage is still read from
    u32 part;                           // which tokens take part

    DEVICE Way(Steps &steps, int number) : shared(steps), group(number) {}
    DEVICE void begin_tile(int steps) {
        step = -1;
        total = steps;
        held = held_stage = 0;
    }
    DEVICE void end_tile() {
        if (total > 0) ring.next();
    }
    // To the next step that a row of this group takes part in. Copies wait for stages to be given back: a group that holds one must not
    // wait for the step that is to be copied there.
    DEVICE Found advance(bool holds) {
        while (step + 1 < total) {
            if (holds && step + 1 == held + STAGES) return GIVE_BACK;
            if (++step) ring.next();
            wait(&shared.full[ring.stage], ring.parity);
            part = shared.takes_part[ring.stage][group];
            if (part) return TAKES_PART;
            if (threadIdx.x % 32 == 0) arrive(&shared.empty[ring.stage]);
        }
        return END;
    }
    DEVICE void hold() {
        held = step;
        held_stage = ring.stage;
    }
    DEVICE void give_back() {
        if (threadIdx.x % 32 == 0) arrive(&shared.empty[held_stage]);
    }
};

// Of the group's rows a thread has two, 8 apart: (token, head), their bit in `part` (none where they do not exist), and where they end.
struct Rows {
    u32 bit[2];
    int limit[2];
    DEVICE Rows(const Problem &p, const Tile &tile, int group) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r, token = row / H;
            i64 s = static_cast<i64>(tile.i) * TOKENS + group * TQ + token;
            const bool exists = token < TQ && s < p.S;
            bit[r] = exists ? 1u << token : 0u;
            limit[r] = exists ? row_limit(p, tile.b, s) : 0;
        }
    }
    // The row's place among B*S*G*H.
    DEVICE i64 place(const Problem &p, const Tile &tile, int group, int r) const {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
        return ((tile.b * p.S + static_cast<i64>(tile.i) * TOKENS + group * TQ + row / H) * p.G + tile.g) * H + row % H;
    }
};

// d = a k^T of 64 rows and 64 keys with `COLUMNS` columns; rows and keys in panels.
template <int COLUMNS>
DEVICE void begin_products(float (&d)[KEYS / 2], u32 rows, u32 keys) {
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k)
        wgmma_shared(d, descriptor(rows + k / 4 * PANEL + k % 4 * 32), descriptor(keys + k / 4 * PANEL + k % 4 * 32), k > 0);
}
// acc += a x, a of 64 rows and 64 keys in registers, x: keys by COLUMNS columns in panels.
template <int COLUMNS>
DEVICE void begin_sum(float (&acc)[COLUMNS / 2], const u32 (&a)[KEYS / 16][4], u32 x) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) wgmma_registers(acc, a[k], descriptor(x + k * 2048, PANEL));
}
// Numbers of a step, rounded: operand of the next product.
DEVICE void round_step(u32 (&to)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[k][i] = pack(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
}
// A group's results, rows scaled, rounded and in panels, to shared memory and from there to [B,S,G,H,COLUMNS].
template <int COLUMNS>
DEVICE void store_rows(const float (&acc)[COLUMNS / 2], const float (&scale)[2], unsigned char *memory, const TensorMap &map, const Tile &tile, int group) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
        int piece = j + lane / 16;
        store_matrices(shared_address(memory) + piece / 8 * PANEL + swizzled(row, piece % 8), pack(acc[4 * j] * scale[0], acc[4 * j + 1] * scale[0]),
                       pack(acc[4 * j + 2] * scale[1], acc[4 * j + 3] * scale[1]), pack(acc[4 * j + 4] * scale[0], acc[4 * j + 5] * scale[0]),
                       pack(acc[4 * j + 6] * scale[1], acc[4 * j + 7] * scale[1]));
    }
    publish_writes();
    barrier<128>(group + 1);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 64) store_rows_box(memory + c / 64 * PANEL, &map, c, tile.g, tile.i * TOKENS + group * TQ, tile.b);
        commit_stores();
    }
}
