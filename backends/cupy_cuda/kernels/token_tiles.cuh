// Tiles of adjacent tokens on Hopper: what the forward pass and dq share. The keys and values of the union of a tile's blocks (union_of.cu)
// travel once for all groups of warps of a block, STAGES steps of 64 keys ahead.
//
// A group of four warps has 64 rows of the matrix unit, TQ = 64 / H tokens with their heads. Every group waits for every step, and takes
// part in those that one of its tokens chose. Blocks of threads stay and take tile after tile, the next one as they are done: tiles differ
// in how many blocks they have, and in turns given beforehand some block of threads would end well after the others. Of a tile's list come
// first
//   cut blocks    the causal clamp, or the end of the cache, cuts them for some row: they need a mask for every element, and what no row
//                 that chose them may see is made zero, since p = 0 would not cancel NaN, nor a mask what rows see that did not choose it
//   whole blocks  all rows of the tile see them to their last key
//
//   H        heads a group of queries (2 to 64)
//   GROUPS   groups of warps that compute
//   STAGES   steps under way
//   BLOCK    keys of a block, a multiple of 64
#pragma once
#include "common.cuh"
#include "tma.cuh"

constexpr int TQ = 64 / H, TOKENS = GROUPS * TQ;  // of a group, of a block
constexpr int KEYS = 64, STEPS = BLOCK / KEYS;
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int COMPUTING = GROUPS == 3 ? 152 : 224, COPYING = 56;  // registers a thread

// The lists of a plan.
struct Plan {
    const int *blocks;   // [tiles of all * capacity]: the union of a tile's blocks, whole ones first
    const u64 *members;  // which of the tile's tokens chose each
    const int2 *counts;  // whole blocks, all blocks
    i64 tiles, capacity, all;  // tiles of a batch entry and group, blocks of a list at most, tiles
    i64 together;              // pairs of batch entry and group whose tiles take turns
    u32 *taken;                // tiles beyond each block's first that were taken, 0 at first; null where there are none

    // One warp: a turn that no other has, beyond the first ones.
    DEVICE u32 take() const {
        u32 before = threadIdx.x % 32 == 0 && taken ? atomicAdd(taken, 1u) : static_cast<u32>(all);
        return gridDim.x + __shfl_sync(ALL, before, 0);
    }
    // Where entry e of a tile, counted in the order of steps, stands in its list.
    DEVICE i64 place(u32 tile, int2 count, int e) const {
        int cut = count.y - count.x;
        return tile * capacity + (e < cut ? count.x + e : e - cut);
    }
};

// A tile of tokens: late ones, which see the most blocks, first.
// Where their keys and values fit the L2 cache side by side, `together` pairs of batch entry and group take turns: the last tiles are short then.
struct Tile {
    int i, b, g;
    u32 number;
    DEVICE Tile(u32 turn, const Plan &plan, u32 G) {
        const u32 tiles = plan.tiles, together = plan.together, pairs = static_cast<u32>(plan.all) / tiles;
        const u32 first = turn / (tiles * together) * together, width = min(together, pairs - first), rest = turn - first * tiles;
        const u32 bg = first + rest % width;
        i = tiles - 1 - rest / width;
        b = bg / G;
        g = bg % G;
        number = bg * tiles + i;
    }
};

// The tiles of a block of threads, in order: the warp that copies their steps takes them, all others read here which are next.
struct Turns {
    static constexpr int AHEAD = 2;
    u64 full[AHEAD], empty[AHEAD];
    u32 turn[AHEAD];
    int2 counts[AHEAD];

    DEVICE void init() {
        for (int i = 0; i < AHEAD; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], 5 * GROUPS);  // a lane of every warp that computes or copies rows
        }
    }
};
struct Turn {
    Turns &shared;
    int number = 0;
    u32 turn;
    int2 counts;

    DEVICE Turn(Turns &turns) : shared(turns) {}
    DEVICE int slot() const { return number % Turns::AHEAD; }
    DEVICE int parity() const { return number / Turns::AHEAD % 2; }
    DEVICE int odd() const { return (number - 1) % 2; }  // of the tile that was taken: the parity of what has one phase a tile
    // For the warp that takes them: its next tile, past the last one too.
    DEVICE void give(const Plan &plan, u32 G, u32 next) {
        turn = next;
        counts = turn < plan.all ? plan.counts[Tile(turn, plan, G).number] : make_int2(0, 0);
        wait(&shared.empty[slot()], parity() ^ 1);
        if (threadIdx.x % 32 == 0) {
            shared.turn[slot()] = turn;
            shared.counts[slot()] = counts;
            arrive(&shared.full[slot()]);
        }
        ++number;
    }
    // For the others: whether there is another tile.
    DEVICE bool take(const Plan &plan) {
        wait(&shared.full[slot()], parity());
        turn = shared.turn[slot()];
        counts = shared.counts[slot()];
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&shared.empty[slot()]);
        ++number;
        return turn < plan.all;
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

// One past the last key that some row of `members`, which are the tile's, may see.
DEVICE int last_seen(const Problem &p, const Tile &tile, u64 members) {
    int seen = 0;
    for (int r = threadIdx.x % 32; r < TOKENS; r += 32)
        if (members >> r & 1) seen = max(seen, row_limit(p, tile.b, static_cast<i64>(tile.i) * TOKENS + r));
    return __reduce_max_sync(ALL, seen);
}

// One warp: the keys and values of every step, for all groups. What no row that chose a block may see of it is made zero.
DEVICE void copy_steps(const TensorMap &k_map, const TensorMap &v_map, const Problem &p, const Plan &plan, unsigned char *stages, Steps &shared, Turns &turns) {
    int lane = threadIdx.x % 32, raw_parity = 0;
    Ring<STAGES> ring;
    Turn turn(turns);
    for (turn.give(plan, p.G, blockIdx.x); turn.turn < plan.all; turn.give(plan, p.G, plan.take())) {
        Tile tile(turn.turn, plan, p.G);
        const int2 counts = turn.counts;
        int cut = counts.y - counts.x, block = 0;
        u64 members = 0;
        for (int e = 0; e < counts.y; ++e) {
            if (e % 32 == 0 && e + lane < counts.y) {
                i64 at = plan.place(tile.number, counts, e + lane);
                block = plan.blocks[at];
                members = plan.members[at];
            }
            int first = __shfl_sync(ALL, block, e % 32) * BLOCK;
            u64 chosen = __shfl_sync(ALL, members, e % 32);
            const int seen = e < cut ? last_seen(p, tile, chosen) : first + BLOCK;
            for (int key = first; key < first + BLOCK; key += KEYS, ring.next()) {
                unsigned char *k_tile = stages + ring.stage * STAGE_BYTES, *v_tile = k_tile + K_BYTES;
                const bool mend = key + KEYS > seen;
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
#pragma unroll 1
                    for (int panel = 0; panel < STAGE_BYTES / PANEL; ++panel)  // whole rows: where their pieces stand does not matter
                        for (int i = max(seen - key, 0) * 8 + lane; i < KEYS * 8; i += 32)
                            *reinterpret_cast<uint4 *>(k_tile + panel * PANEL + i * 16) = make_uint4(0, 0, 0, 0);
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
DEVICE void copy_rows(const TensorMap &map, const TensorMap &more, const Problem &p, const Plan &plan, unsigned char *to, u64 *full, u64 *empty, int group, Turns &turns) {
    Turn turn(turns);
    while (turn.take(plan)) {
        Tile tile(turn.turn, plan, p.G);
        wait(empty, turn.odd() ^ 1);
        __syncwarp();  // all lanes have seen it: the next phase may pass
        if (threadIdx.x % 32) continue;
        const int s = tile.i * TOKENS + group * TQ;
        arrive_expecting(full, (COLUMNS + MORE) / 64 * TQ * H * 128);
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 64) copy_rows_box(to + c / 64 * PANEL, &map, full, c, tile.g, s, tile.b);
#pragma unroll
        for (int c = 0; c < MORE; c += 64) copy_rows_box(to + (COLUMNS + c) / 64 * PANEL, &more, full, c, tile.g, s, tile.b);
    }
}

// A step of a tile, and which of a group's tokens chose it.
struct Step {
    int number, stage;
    u32 part;
};
constexpr u32 VALUES = K_BYTES / 16 + ACROSS;  // from a step's keys to its values, whose rows are summed over

constexpr int NO_END = -1;
enum Found { TAKES_PART, GIVE_BACK, END };

// A group's way through the steps of a tile.
struct Way {
    Steps &shared;
    const int group;
    const u32 stages;  // the first stage, an operand
    Ring<STAGES> ring;  // of the step that comes next
    int next, total;

    DEVICE Way(Steps &steps, int number, const unsigned char *memory)
        : shared(steps), group(number), stages(uniform(operand(shared_address(memory)))) {}
    DEVICE void begin_tile(int steps) {
        next = 0;
        total = steps;
    }
    // To the next step that a row of this group takes part in. Copies wait for stages to be given back: a group that holds one must not
    // wait for the step that is to be copied there, which `end` is the number of.
    DEVICE Found find(Step &step, int end) {
        while (next < total) {
            if (next == end) return GIVE_BACK;
            wait(&shared.full[ring.stage], ring.parity);
            step = {next++, ring.stage, shared.takes_part[ring.stage][group]};
            ring.next();
            if (step.part) return TAKES_PART;
            __syncwarp();  // all lanes have read it
            give_back(step);
        }
        return END;
    }
    // Where a step's keys stand, as an operand.
    DEVICE u32 keys(const Step &step) const { return uniform(stages + step.stage * (STAGE_BYTES / 16)); }
    DEVICE void give_back(const Step &step) {
        if (threadIdx.x % 32 == 0) arrive(&shared.empty[step.stage]);
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

// d = a k^T of 64 rows and 64 keys with `COLUMNS` columns; rows and keys in panels, operands.
template <int COLUMNS>
DEVICE void begin_products(float (&d)[KEYS / 2], u32 rows, u32 keys) {
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k)
        wgmma_shared(d, descriptor(rows + (k / 4 * PANEL + k % 4 * 32) / 16), descriptor(keys + (k / 4 * PANEL + k % 4 * 32) / 16), k > 0);
}
// acc += a x, a of 64 rows and 64 keys in registers, x: keys by COLUMNS columns in panels, an operand.
template <int COLUMNS>
DEVICE void begin_sum(float (&acc)[COLUMNS / 2], const u32 (&a)[KEYS / 16][4], u32 x) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) wgmma_registers(acc, a[k], descriptor(x + k * 2048 / 16));
}
// Numbers of a step, rounded: operand of the next product.
DEVICE void round_step(u32 (&to)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[k][i] = pack(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
}
// A group's results, rows scaled and rounded, to [B,S,G,H,COLUMNS]; from registers, so that nothing in shared memory waits for it. Rows whose
// scale is 0 get zeros: one that chose nothing has met every step with p = 0, which NaN or infinity in its own q or do makes NaN.
template <int COLUMNS>
DEVICE void write_rows(const float (&acc)[COLUMNS / 2], const float (&scale)[2], u16 *to, const Problem &p, const Tile &tile, int group) {
    const Rows rows(p, tile, group);  // again, rather than kept in registers all the time
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        u16 *row = to + rows.place(p, tile, group, r) * COLUMNS + threadIdx.x % 4 * 8;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 4) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[i] = scale[r] == 0.0f ? 0 : pack(acc[4 * (j + i) + 2 * r] * scale[r], acc[4 * (j + i) + 2 * r + 1] * scale[r]);
            transpose(x);
            if (rows.bit[r]) *reinterpret_cast<uint4 *>(row + 8 * j) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}
