// A row's keys, walked by teams of warps: a team takes every `step`-th tile of TILE keys through STAGES buffers of its own, so that
// copies run while the matrix unit works and teams never wait for each other.
//
//   TILE        keys at once: 16 or 32
//   STAGES      buffers of a team, 2 or more
//   TEAMS       teams of a block; one where it has several warps
//   HEAD_WARPS  warps of a team; each has 16 of the group's heads, the rows of its matrix operands, and all share the team's keys
#pragma once
#include "common.cuh"

constexpr int HEADS = 16 * HEAD_WARPS;
constexpr int TEAM = 32 * HEAD_WARPS;   // threads
constexpr int THREADS = TEAM * TEAMS;
constexpr int STAGE = TILE * (KP + VP);  // numbers of a buffer: the tile's keys, then its values

// Ranges laid end to end, 32 at a time, one a lane: key number w in [before, after) of the 32 stands at position w + shift. So short and
// unaligned ranges fill whole tiles, and only the last tile of every 32 ranges may be cut.
struct Walk {
    const Problem &p;
    i64 row;    // among B*S*G
    int limit;  // one past the last key that the row may see
    int step;   // tiles of all teams that share the row, all programs'
    i64 first = -32;        // the first of the 32 ranges
    int after = 0, shift = 0;
    int keys = 0;           // of the 32 ranges
    i64 at;                 // the key number at which this team's next tile begins

    DEVICE Walk(const Problem &problem, i64 row_number, int row_end, int team, int teams)
        : p(problem), row(row_number), limit(row_end), step(teams), at(static_cast<i64>(team) * TILE) {}

    // The next tile of this team: how many keys it has, 0 after the last, and the position of its key lane % TILE (0 past the keys).
    DEVICE int next(int &position) {
        int lane = threadIdx.x % 32;
        while (at >= keys) {
            at -= (keys + TILE - 1) / TILE * TILE;  // tiles are numbered on from one 32 ranges to the next
            first += 32;
            if (first >= p.n) {
                keys = 0;
                return 0;
            }
            int start = 0, end = 0;
            if (first + lane < p.n) clamped_range(p, row * p.n + first + lane, limit, start, end);
            after = end - start;
            for (int i = 1; i < 32; i *= 2) {
                int sum = __shfl_up_sync(ALL, after, i);
                if (lane >= i) after += sum;
            }
            shift = start - (after - (end - start));
            keys = __shfl_sync(ALL, after, 31);
        }
        int w = static_cast<int>(at) + lane % TILE, count = min(TILE, keys - static_cast<int>(at));
        int range = 0;  // the number of ranges that end at or before w: a binary search over the lanes
        for (int jump = 16; jump; jump /= 2)
            if (__shfl_sync(ALL, after, range + jump - 1) <= w) range += jump;
        position = w + __shfl_sync(ALL, shift, range);
        if (lane % TILE >= count) position = 0;
        at += static_cast<i64>(step) * TILE;
        return count;
    }
};

DEVICE int team_of() { return threadIdx.x / TEAM; }

// All threads of the team have come here, and see what the others wrote to shared memory.
DEVICE void team_barrier() {
    static_assert(HEAD_WARPS == 1 || TEAMS == 1, "no barrier of some warps");
    if (HEAD_WARPS == 1)
        __syncwarp();
    else
        __syncthreads();
}

// Copy the rows at each lane's position (of lane r: row r) to a tile in shared memory; zeros from `count` on and past D columns.
// One multiplication an address, and no choice between two: what is not read may be any.
template <int D, int PITCH>
DEVICE void copy_keys(u16 *tile, const u16 *base, i64 stride, int position, int count) {
    constexpr int PIECES = (PITCH - 8) / 8, ALL_PIECES = TILE * PIECES;
#pragma unroll
    for (int turn = 0; turn < (ALL_PIECES + TEAM - 1) / TEAM; ++turn) {
        int i = turn * TEAM + static_cast<int>(threadIdx.x % TEAM);
        if (ALL_PIECES % TEAM && i >= ALL_PIECES) break;  // whole warps
        int r = i / PIECES, column = i % PIECES * 8;
        u32 at = __shfl_sync(ALL, position, r);
        const u16 *from = base + column + at * static_cast<unsigned long long>(stride);
        copy_eight(tile + r * PITCH + column, from, r < count && column < D);
    }
}

// The tiles of a team, copied ahead: `take` waits for the next one and starts the copies of a later one.
struct Tiles {
    Walk walk;
    u16 *buffers;             // STAGES of STAGE numbers
    const u16 *k_base, *v_base;
    int counts[STAGES];       // keys of the tiles under way, the next one first
    int stage = 0;            // the buffer of the tile that `take` gave last

    DEVICE Tiles(const Walk &from, u16 *memory, const u16 *keys, const u16 *values)
        : walk(from), buffers(memory), k_base(keys), v_base(values) {
        stage = STAGES - 1;
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) counts[i] = copy_next(i);
    }

    DEVICE int copy_next(int into) {
        int position, count = walk.next(position);
        if (count) {
            copy_keys<DK, KP>(buffers + into * STAGE, k_base, walk.p.stride_kn, position, count);
            copy_keys<DV, VP>(buffers + into * STAGE + TILE * KP, v_base, walk.p.stride_vn, position, count);
        }
        commit_copies();  // a group for every turn, empty ones too: the number of groups tells what has arrived
        return count;
    }

    // The next tile's number of keys, 0 after the last. Until the next `take`, k() and v() hold it.
    DEVICE int take() {
        wait_copies<STAGES - 2>();
        team_barrier();  // the tile is there for all, and nobody reads the one before it any more: its buffer is free
        counts[STAGES - 1] = copy_next(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        int count = counts[0];
#pragma unroll
        for (int i = 1; i < STAGES; ++i) counts[i - 1] = counts[i];
        return count;
    }

    DEVICE const u16 *k() const { return buffers + stage * STAGE; }
    DEVICE const u16 *v() const { return buffers + stage * STAGE + TILE * KP; }
};
