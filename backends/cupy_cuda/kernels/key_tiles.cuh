// Gather the keys of one query row into tiles of TILE keys through a cp.async pipeline, for forward_rows.cu and
// dq_rows.cu.
//
// A CTA computes HEADS heads of a row. Team t of its warps takes every TEAMS-th tile through its own STAGES buffers, so
// that teams never wait for each other; each warp of a team owns 16 heads. The kernel merges the teams' results.
//
//   TILE, STAGES       keys per tile, 16 or 32; buffers per team, 2 or more
//   TEAMS, HEAD_WARPS  teams per CTA, 1 if a team has several warps; warps per team
//   Q_REGISTERS        1: q (and do) stay in registers; 0: they are read from shared memory for every tile (wide heads)
//   ONE_PAGE           1: every range lies within one page, which is read with the range; 0: it is read for every key
//   REPEATED_BLOCK     keys per block, of rows that may name a block twice; 0: the ranges of a row are disjoint
#pragma once
#include "mma.cuh"
#include "named_blocks.cuh"
#include "softmax.cuh"

constexpr int HEADS = 16 * HEAD_WARPS;
constexpr int TEAM = 32 * HEAD_WARPS;  // threads per team
constexpr int THREADS = TEAM * TEAMS;
constexpr int STAGE = TILE * (KP + VP);  // elements per buffer: a tile's keys, then its values

// The work of a CTA: heads [head0, head0 + HEADS) of a row. A warp owns 16 of them, starting at `warp_head`.
struct RowHeads {
    Row row;
    int head0, warp_head, team;
    DEVICE RowHeads(const Problem &p, u32 pid, u32 head_tiles)
        : row(row_of(p, pid / head_tiles)), head0(pid % head_tiles * HEADS), warp_head(threadIdx.x % TEAM / 32 * 16),
          team(threadIdx.x / TEAM) {}
    // The index of a head of this CTA in [B,S,G,h].
    DEVICE i64 index(const Problem &p, int head) const { return row.index * p.h + head0 + head; }
};

// A key: its index within a page, or within the sequence without pages.
struct KeyLocation {
    int key, page;
};

// Iterate over the tiles of a row for one team. Ranges are concatenated to fill tiles, 32 at a time, one per lane.
struct KeyIterator {
    const Problem &p;
    i64 row;    // of ranges
    int b;
    int limit;  // one past the last key that the row may see
    int step;   // tiles between this team's tiles
    i64 next;   // key number of the next tile's first key within the 32 ranges
    i64 first_range = -32;
    int keys = 0;         // keys of the 32 ranges
    int prefix = 0;       // keys of the ranges up to and including this lane's (inclusive prefix sum)
    int to_position = 0;  // position minus key number in this lane's range
    int page = 0;         // page of this lane's range

    DEVICE KeyIterator(const Problem &problem, const Row &row, int tile, int tiles)
        : p(problem), row(ranges_row(row.index)), b(row.b), limit(row_limit(problem, row.b, row.s)), step(tiles), next(static_cast<i64>(tile) * TILE) {}

    // Advance to the next tile; return its number of keys, 0 after the last. location: of key lane % TILE of the tile.
    DEVICE int next_tile(KeyLocation &location) {
        const int lane = threadIdx.x % 32;
        while (next >= keys) {
            // Keep the round robin among teams: subtract the whole tiles of these 32 ranges.
            next -= (keys + TILE - 1) / TILE * TILE;
            first_range += 32;
            if (first_range >= p.n) {
                keys = 0;
                return 0;
            }
            load_ranges(lane);
        }
        const int key = static_cast<int>(next) + lane % TILE, count = min(TILE, keys - static_cast<int>(next));
        int range = 0;  // number of ranges that end at or before the key, by binary search over the lanes
        for (int jump = 16; jump; jump /= 2)
            if (__shfl_sync(ALL_LANES, prefix, range + jump - 1) <= key) range += jump;
        const int position = key + __shfl_sync(ALL_LANES, to_position, range);
        if constexpr (PAGED && ONE_PAGE) {
            location = {in_page(position), __shfl_sync(ALL_LANES, page, range)};
            if (lane % TILE >= count) location = {0, 0};
        } else location = lane % TILE < count ? KeyLocation{in_page(position), page_of(p, b, position)} : KeyLocation{0, 0};
        next += static_cast<i64>(step) * TILE;
        return count;
    }

    DEVICE void load_ranges(int lane) {
        int start = 0, end = 0;
        if (first_range + lane < p.n) clamped_range(p, row * p.n + first_range + lane, limit, start, end);
        if constexpr (REPEATED_BLOCK > 0) {
            __shared__ NamedBlocks named[THREADS / 32];  // of each warp
            if (first_range == 0) named[threadIdx.x / 32].clear(limit / REPEATED_BLOCK);
            if (!named[threadIdx.x / 32].add(start / REPEATED_BLOCK, end > start)) end = start;
        }
        prefix = warp_prefix_sum(end - start);
        to_position = start - (prefix - (end - start));
        keys = __shfl_sync(ALL_LANES, prefix, 31);
        if (PAGED && ONE_PAGE) page = end > start ? page_of(p, b, start) : 0;
    }
};

// Synchronize the threads of a team.
DEVICE void team_sync() {
    static_assert(HEAD_WARPS == 1 || TEAMS == 1, "no barrier of some warps");
    if (HEAD_WARPS == 1) __syncwarp();
    else __syncthreads();
}

// Gather keys into a tile; lane r holds the location of row r. Rows from `count` and columns from D on are zero.
template <int D, int PITCH>
DEVICE void gather_keys(u16 *tile, const KeysTensor &x, const u16 *base, const KeyLocation &location, int count) {
    constexpr int CHUNKS = (PITCH - 8) / 8, ALL_CHUNKS = TILE * CHUNKS;
    UNROLL for (int first = 0; first < ALL_CHUNKS; first += TEAM) {
        const int i = first + static_cast<int>(threadIdx.x % TEAM);
        if (ALL_CHUNKS % TEAM && i >= ALL_CHUNKS) break;  // whole warps
        const int r = i / CHUNKS, column = i % CHUNKS * 8;
        const u32 key = __shfl_sync(ALL_LANES, location.key, r);
        const u16 *from = base + column + key * static_cast<u64>(x.stride_n);  // not read for rows that do not exist
        if (PAGED) from += __shfl_sync(ALL_LANES, location.page, r) * x.stride_b;
        cp_async_16(tile + r * PITCH + column, from, r < count && column < D);
    }
}

// A team's cp.async pipeline: `next_tile` waits for the next tile and starts the copies of a later one.
struct KeyPipeline {
    KeyIterator tiles;
    u16 *buffers;  // STAGES buffers of STAGE elements
    const u16 *k_base, *v_base;  // page 0 of a page pool
    int counts[STAGES];      // keys of the tiles in flight, next tile first
    int stage = STAGES - 1;  // buffer of the tile that `next_tile` returned last

    DEVICE KeyPipeline(const KeyIterator &iterator, u16 *memory, const Row &row)
        : tiles(iterator), buffers(memory), k_base(iterator.p.k.keys(PAGED ? 0 : row.b, row.g)),
          v_base(iterator.p.v.keys(PAGED ? 0 : row.b, row.g)) {
        UNROLL for (int i = 0; i < STAGES - 1; ++i) counts[i] = copy_next(i);
    }

    DEVICE int copy_next(int into) {
        KeyLocation location;
        const int count = tiles.next_tile(location);
        if (count) {
            gather_keys<DK, KP>(buffers + into * STAGE, tiles.p.k, k_base, location, count);
            gather_keys<DV, VP>(buffers + into * STAGE + TILE * KP, tiles.p.v, v_base, location, count);
        }
        cp_async_commit();  // commit empty groups, too: cp_async_wait counts groups
        return count;
    }

    // Wait for the next tile, which k() and v() hold until the next call; return its number of keys, 0 after the last.
    DEVICE int next_tile() {
        cp_async_wait<STAGES - 2>();
        team_sync();  // all threads see the tile, and all have finished the previous one, so its buffer is free
        counts[STAGES - 1] = copy_next(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        const int count = counts[0];
        UNROLL for (int i = 1; i < STAGES; ++i) counts[i - 1] = counts[i];
        return count;
    }

    DEVICE const u16 *k() const { return buffers + stage * STAGE; }
    DEVICE const u16 *v() const { return buffers + stage * STAGE + TILE * KP; }
};

// A warp's 16 heads of q or do as mma operand A, in registers (Q_REGISTERS) or in shared memory.
template <int PITCH> struct HeadsOperand {
    static constexpr int STEPS = (PITCH - 8) / 16;
    const u16 *tile;
    const int warp_head;
    u32 a[Q_REGISTERS ? STEPS : 1][4];
    DEVICE HeadsOperand(const u16 *heads, int head) : tile(heads), warp_head(head) {
        UNROLL for (int k = 0; Q_REGISTERS && k < STEPS; ++k) load_a<PITCH>(a[k], tile, warp_head, 16 * k);
    }
    // s += heads * keys^T
    template <int N> DEVICE void add_products(float (&s)[N][4], const u16 *keys) const {
        if constexpr (Q_REGISTERS) add_a_bt<PITCH, STEPS>(s, a, keys);
        else add_a_bt<PITCH, STEPS>(s, tile, warp_head, keys);
    }
};
