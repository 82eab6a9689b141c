// o and lse of tiles of adjacent tokens on Hopper: K and V travel once for all groups of warps of a block, by bulk copies.
//
// A group of four warps has 64 rows of the matrix unit, TQ = 64 / H tokens with their heads; a block has GROUPS of them, and a warp that
// copies the union of their blocks (union.cu), STAGES steps of 64 keys ahead. Every group waits for every step, and takes part in those
// that one of its tokens chose: the union of all tokens travels, that of a group's tokens is computed. Blocks stay and take tile after tile.
//   cut blocks    the causal clamp, or the end of the cache, cuts them for some row: they come first, with a mask for every element, and
//                 their values that no row may see are made zero, since p = 0 would not cancel NaN
//   whole blocks  s = q k^T of one step and acc += p v of the step before are under way together, while the softmax of s is computed beside
//                 the latter: logits wait for the copies, p for its softmax, nothing for both
// Running maxima are kept loosely: they follow once a logit passes one by more than 2^SLACK allows, so that most steps need no maximum over
// lanes and leave acc alone. p stays below 2^SLACK, and o = acc / l does not depend on m.
//
//   H        heads a group of queries (2 to 64)
//   GROUPS   groups of warps that compute
//   STAGES   steps under way
//   BLOCK    keys of a block, a multiple of 64
#include "common.cuh"
#include "hopper.cuh"

constexpr int TQ = 64 / H, TOKENS = GROUPS * TQ;  // of a group, of a block
constexpr int KEYS = 64, STEPS = BLOCK / KEYS;
constexpr int PANEL = 64 * 128;  // bytes of 64 rows of 64 columns
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int Q_BYTES = DK / 64 * PANEL, O_BYTES = DV / 64 * PANEL;  // of a group
constexpr int COMPUTING = GROUPS == 3 ? 152 : 232, COPYING = GROUPS == 3 ? 56 : 40;  // registers a thread
constexpr float SLACK = 8.0f;

struct Arguments {
    TensorMap q, o, k, v;
    Problem p;
    const int *blocks;   // [tiles of all * capacity]: the union of a tile's blocks, whole ones first
    const u64 *members;  // which of the tile's tokens chose each
    const int2 *counts;  // whole blocks, all blocks
    float *lse;          // [B,S,G,h]
    i64 tiles, capacity, all;  // tiles of a batch entry and group, blocks of a list at most, tiles
};

// A tile of tokens: late ones, which see the most blocks, first.
struct Tile {
    int i, b, g;
    i64 number;
    DEVICE Tile(u32 turn, u32 tiles, u32 G) {
        i = tiles - 1 - turn % tiles;
        b = turn / tiles / G;
        g = turn / tiles % G;
        number = static_cast<i64>(turn / tiles) * tiles + i;
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

struct Shared {
    u64 full[STAGES], empty[STAGES], raw, q_full[GROUPS], q_empty[GROUPS];
    u32 takes_part[STAGES][GROUPS];  // bit r: token r of the group chose the step's block
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

// One warp: the keys and values of every step, for all groups.
DEVICE void copy_steps(const Arguments &x, unsigned char *stages, Shared &shared) {
    int lane = threadIdx.x % 32, raw_parity = 0;
    Ring ring;
    for (u32 turn = blockIdx.x; turn < x.all; turn += gridDim.x) {
        Tile tile(turn, x.tiles, x.p.G);
        int2 counts = x.counts[tile.number];
        int seen = last_seen(x.p, tile), cut = counts.y - counts.x, block = 0;
        u64 members = 0;
        for (int e = 0; e < counts.y; ++e) {
            if (e % 32 == 0 && e + lane < counts.y) {
                i64 at = tile.number * x.capacity + (e + lane < cut ? counts.x + e + lane : e + lane - cut);
                block = x.blocks[at];
                members = x.members[at];
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
                    for (int c = 0; c < DK; c += 64) copy_keys_box(k_tile + c / 64 * PANEL, &x.k, landed, c, key, tile.g, tile.b);
#pragma unroll
                    for (int c = 0; c < DV; c += 64) copy_keys_box(v_tile + c / 64 * PANEL, &x.v, landed, c, key, tile.g, tile.b);
                }
                if (mend) {
                    wait(landed, raw_parity);
                    raw_parity ^= 1;
                    for (int i = lane; i < V_BYTES / 16; i += 32)  // rows are whole: where their pieces stand does not matter
                        if (key + i / 8 % KEYS >= seen) *reinterpret_cast<uint4 *>(v_tile + i * 16) = make_uint4(0, 0, 0, 0);
                    publish_writes();
                    __syncwarp();
                    if (lane == 0) arrive(&shared.full[ring.stage]);
                }
            }
        }
    }
}

// One warp for each group: its rows of q, as soon as the tile before needs them no more.
DEVICE void copy_queries(const Arguments &x, unsigned char *q_tile, Shared &shared, int group) {
    int parity = 0;
    for (u32 turn = blockIdx.x; turn < x.all; turn += gridDim.x, parity ^= 1) {
        Tile tile(turn, x.tiles, x.p.G);
        wait(&shared.q_empty[group], parity ^ 1);
        if (threadIdx.x % 32) continue;
        arrive_expecting(&shared.q_full[group], DK / 64 * TQ * H * 128);
#pragma unroll
        for (int c = 0; c < DK; c += 64)
            copy_rows_box(q_tile + c / 64 * PANEL, &x.q, &shared.q_full[group], c, tile.g, tile.i * TOKENS + group * TQ, tile.b);
    }
}

enum Found { TAKES_PART, GIVE_BACK, END };

DEVICE void attend(const Arguments &x, unsigned char *stages, unsigned char *q_memory, unsigned char *o_memory, Shared &shared, int group) {
    const Problem &p = x.p;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const float c = p.scale_log2, slack = SLACK / c;
    const u32 q_tile = uniform(shared_address(q_memory)), stage0 = uniform(shared_address(stages));
    int q_parity = 0;
    Ring ring;
    int2 coming = make_int2(0, 0);  // the next tile's counts
    if (blockIdx.x < x.all) coming = x.counts[Tile(blockIdx.x, x.tiles, p.G).number];
    for (u32 turn = blockIdx.x; turn < x.all; turn += gridDim.x, q_parity ^= 1) {
        Tile tile(turn, x.tiles, p.G);
        const int total = coming.y * STEPS, cut = (coming.y - coming.x) * STEPS, first_cut = coming.x;
        if (turn + gridDim.x < x.all) coming = x.counts[Tile(turn + gridDim.x, x.tiles, p.G).number];
        // Of the group's rows this thread has two, with this bit in `takes_part` and this limit.
        u32 bit[2];
        int limit[2];
        i64 out[2];
        bool exists[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int row = warp * 16 + lane / 4 + 8 * r, token = row / H;
            i64 s = static_cast<i64>(tile.i) * TOKENS + group * TQ + token;
            exists[r] = token < TQ && s < p.S;
            bit[r] = exists[r] ? 1u << token : 0u;
            limit[r] = exists[r] ? row_limit(p, tile.b, s) : 0;
            out[r] = ((tile.b * p.S + s) * p.G + tile.g) * H + row % H;
        }
        float acc[DV / 2], s[KEYS / 2], m[2] = {LOWEST, LOWEST}, l[2] = {0.0f, 0.0f}, alpha[2] = {1.0f, 1.0f};
        u32 weights[KEYS / 16][4];  // p as operand
        bool rises = false;
        int step = -1, held = 0, held_stage = 0;  // of the values that are still to be added
        u32 part = 0;
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) acc[i] = 0.0f;

        // To the next step that a row of this group takes part in. Copies wait for stages to be given back: a group that holds one must
        // not wait for the step that is to be copied there.
        auto advance = [&](bool holds) {
            while (step + 1 < total) {
                if (holds && step + 1 == held + STAGES) return GIVE_BACK;
                if (++step) ring.next();
                wait(&shared.full[ring.stage], ring.parity);
                part = shared.takes_part[ring.stage][group];
                if (part) return TAKES_PART;
                if (lane == 0) arrive(&shared.empty[ring.stage]);
            }
            return END;
        };
        auto begin_logits = [&] {
            const u32 k_tile = uniform(stage0 + ring.stage * STAGE_BYTES);
#pragma unroll
            for (int k = 0; k < DK / 16; ++k)
                wgmma_shared(s, descriptor(q_tile + k / 4 * PANEL + k % 4 * 32), descriptor(k_tile + k / 4 * PANEL + k % 4 * 32), k > 0);
            wgmma_end();
        };
        auto begin_values = [&] {
            const u32 v_tile = uniform(stage0 + held_stage * STAGE_BYTES + K_BYTES);
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k) wgmma_registers(acc, weights[k], descriptor(v_tile + k * 2048, PANEL));
            wgmma_end();
        };
        auto mask = [&] {
            const int key = x.blocks[tile.number * x.capacity + first_cut + step / STEPS] * BLOCK + step % STEPS * KEYS;
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= limit[i / 2 % 2]) s[i] = -infinity();
        };
        auto softmax = [&] {
            float top[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float tops[4];  // several at once: one after the other would wait for each
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float logit = s[i / 2 * 4 + 2 * r + i % 2];
                    tops[i % 4] = i < 4 ? logit : fmaxf(tops[i % 4], logit);
                }
                top[r] = part & bit[r] ? fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])) : LOWEST;
            }
            rises = __any_sync(ALL, top[0] > m[0] + slack || top[1] > m[1] + slack);
            if (rises) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    top[r] = fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 1));
                    top[r] = fmaxf(fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 2)), m[r]);
                    alpha[r] = exp2_fast((m[r] - top[r]) * c);
                    l[r] *= alpha[r];
                    m[r] = top[r];
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float shift = part & bit[r] ? m[r] * c : infinity();
                float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float &logit = s[i / 2 * 4 + 2 * r + i % 2];
                    logit = exp2_fast(logit * c - shift);
                    sums[i % 4] += logit;
                }
                l[r] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
            }
        };
        // The step's p takes the place of the one before; acc follows the maxima.
        auto take_over = [&] {
            if (rises) {
#pragma unroll
                for (int i = 0; i < DV / 2; ++i) acc[i] *= alpha[i / 2 % 2];
            }
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) weights[k][i] = pack(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
            held = step;
            held_stage = ring.stage;
        };
        auto give_back = [&] {
            if (lane == 0) arrive(&shared.empty[held_stage]);
        };

        wait(&shared.q_full[group], q_parity);
        Found found = advance(false);
        while (found == TAKES_PART) {
            wgmma_begin();
            begin_logits();
            wgmma_wait<0>();
            if (step < cut) mask();
            softmax();
            take_over();
            while ((found = advance(true)) == TAKES_PART && step >= cut) {
                wgmma_begin();
                begin_logits();
                begin_values();
                wgmma_wait<1>();
                softmax();
                before_waiting(l[0], &shared.raw);
                before_waiting(l[1], &shared.raw);
                wgmma_wait<0>();
                give_back();
                take_over();
            }
            wgmma_begin();
            begin_values();
            wgmma_wait<0>();
            give_back();
            if (found == GIVE_BACK) found = advance(false);
        }
        if (total > 0) ring.next();

        if (lane == 0) arrive(&shared.q_empty[group]);
        if (threadIdx.x % 128 == 0) wait_for_stores();  // the tile before has left o_memory
        barrier<128>(group + 1);
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] += __shfl_xor_sync(ALL, l[r], 1);
            l[r] += __shfl_xor_sync(ALL, l[r], 2);
            bool seen = !(l[r] == 0.0f);  // a row that saw no key gives 0 and -inf; NaN among its keys shows
            scale[r] = seen ? 1.0f / l[r] : 0.0f;
            if (exists[r] && lane % 4 == 0) x.lse[out[r]] = seen ? (m[r] * c + log2f(l[r])) * LN_2 : -infinity();
        }
#pragma unroll
        for (int j = 0; j < DV / 8; j += 2) {
            int row = warp * 16 + lane % 16, piece = j + lane / 16;
            store_matrices(shared_address(o_memory) + piece / 8 * PANEL + swizzled(row, piece % 8), pack(acc[4 * j] * scale[0], acc[4 * j + 1] * scale[0]),
                           pack(acc[4 * j + 2] * scale[1], acc[4 * j + 3] * scale[1]), pack(acc[4 * j + 4] * scale[0], acc[4 * j + 5] * scale[0]),
                           pack(acc[4 * j + 6] * scale[1], acc[4 * j + 7] * scale[1]));
        }
        publish_writes();
        barrier<128>(group + 1);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int column = 0; column < DV; column += 64)
                store_rows_box(o_memory + column / 64 * PANEL, &x.o, column, tile.g, tile.i * TOKENS + group * TQ, tile.b);
            commit_stores();
        }
    }
    if (threadIdx.x % 128 == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) forward_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char tiles[];  // q of the groups, their o, the stages
    __shared__ Shared shared;
    unsigned char *o_tiles = tiles + GROUPS * Q_BYTES, *stages = o_tiles + GROUPS * O_BYTES;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 - 4 * GROUPS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], 4 * GROUPS);  // a lane of every warp
        }
        for (int i = 0; i < GROUPS; ++i) {
            barrier_init(&shared.q_full[i], 1);
            barrier_init(&shared.q_empty[i], 4);
        }
        barrier_init(&shared.raw, 1);
        barriers_are_ready();
    }
    __syncthreads();
    if (group == GROUPS) {
        give_registers<COPYING>();
        if (warp == 0) copy_steps(x, stages, shared);
        else if (warp <= GROUPS) copy_queries(x, tiles + (warp - 1) * Q_BYTES, shared, warp - 1);
    } else {
        take_registers<COMPUTING>();
        attend(x, stages, tiles + group * Q_BYTES, o_tiles + group * O_BYTES, shared, group);
    }
}
