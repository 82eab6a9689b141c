// Counting sort, last step: scatter every entry to its list (sort.cuh).
//
// Grid: one CTA per chunk. It sorts BLOCK entries at a time in shared memory, so that entries of a list are stored
// together. Lanes that count the same tile at once get their ranks in any order; ordered_place restores the order.
//
//   EACH  entries per thread and block
//   FEW   1: every CTA sums the counts of sort_count.cu itself: at most TABLE tiles, and chunks of BLOCK entries
#include "sort.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, BLOCK = EACH * THREADS, TABLE = 2 * THREADS;  // tiles per pass

struct Arguments {
    Sort sort;
    const int *tiles;      // of sort_count.cu
    int *counts;           // of sum_counts.cu
    i64 *begins;           // [lists + 1]
    int *entries;          // e, list after list
    Segments segments[2];  // stored if FEW, and begins, too
};

struct Shared {
    u32 counts[WARPS][TABLE];  // a warp's entries per tile; then the position of the first one in `sorted`
    u32 sorted[BLOCK + 2];     // between sentinels: tile in the table << 16 | entry in the block
    int to[TABLE];             // per tile: destination in `entries` minus position in `sorted`
    u32 passes[2];             // see `passes_of`
};

// Turn counts into positions in `sorted`, two tiles per thread; return the number of entries. to: where the tiles'
// entries of this block go. counts: of the chunk from these tiles on, advanced if it has `more` blocks.
DEVICE int offsets_from_counts(Shared &shared, const int (&to)[2], int *counts, int tiles, bool more) {
    const int tile = 2 * threadIdx.x;
    int own[2] = {0, 0};
    UNROLL for (int warp = 0; warp < WARPS; ++warp) {
        uint2 *at = reinterpret_cast<uint2 *>(shared.counts[warp] + tile);
        const uint2 count = *at;
        *at = uint2{static_cast<u32>(own[0]), static_cast<u32>(own[1])};
        own[0] += count.x;
        own[1] += count.y;
    }
    int sum[1] = {own[0] + own[1]}, all[1];
    block_prefix_sum<THREADS>(sum, all);
    const int offset[2] = {sum[0] - own[0] - own[1], sum[0] - own[1]};
    UNROLL for (int warp = 0; warp < WARPS; ++warp) {
        uint2 *at = reinterpret_cast<uint2 *>(shared.counts[warp] + tile);
        const uint2 before = *at;
        *at = uint2{before.x + offset[0], before.y + offset[1]};
    }
    for (int i = 0; i < 2; ++i) {
        shared.to[tile + i] = to[i] - offset[i];
        if (more && tile + i < tiles) counts[i] += own[i];
    }
    return all[0];
}

// Return bit i for pass i, the last one for all later passes, if the block from `first` on has an entry of its tiles.
DEVICE u64 passes_of(Shared &shared, const int *all_tiles, u32 first, u32 end) {
    u64 passes = 0;
    if (threadIdx.x == 0) shared.passes[0] = shared.passes[1] = 0;
    for (u32 e = first + threadIdx.x; e < min(end, first + BLOCK); e += THREADS)
        if (all_tiles[e] >= 0) passes |= 1ull << min(static_cast<u32>(all_tiles[e]) / TABLE, 63u);
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
        const u32 half = __reduce_or_sync(ALL_LANES, static_cast<u32>(passes >> 32 * i));
        if (threadIdx.x % 32 == 0 && half) atomicOr(&shared.passes[i], half);
    }
    __syncthreads();
    return static_cast<u64>(shared.passes[1]) << 32 | shared.passes[0];
}

// FEW: compute from all counts where the chunk's entries of two tiles per thread go. The CTA of the first chunk of a
// section of a bg stores where its lists begin, and the segments before them.
DEVICE void add_counts(const Arguments &x, const Chunk &chunk, int (&to)[2]) {
    const u32 tiles = x.sort.tiles, chunks = x.sort.chunks, number = blockIdx.x % chunks, tile = 2 * threadIdx.x;
    int sums[3] = {0, 0, 0}, before[3], own[2] = {0, 0}, own_before[2] = {0, 0}, all[3];  // entries, and segments of both kinds
    for (u32 list = threadIdx.x; list < chunk.list; list += THREADS) {
        int entries = 0;
        for (u32 i = 0; i < chunks; ++i) entries += x.counts[(list / tiles * chunks + i) * tiles + list % tiles];
        sums[0] += entries;
        for (int n = 0; n < 2; ++n) sums[n + 1] += x.segments[n].of(entries);
    }
    block_prefix_sum<THREADS>(sums, before);
    for (u32 i = 0; i < chunks; ++i)
        for (u32 j = 0; j < 2; ++j) {
            const int count = tile + j < tiles ? x.counts[chunk.list * chunks + i * tiles + tile + j] : 0;
            own[j] += count;
            own_before[j] += i < number ? count : 0;
        }
    int upto[3] = {own[0] + own[1], 0, 0};
    for (int n = 0; n < 2; ++n) upto[n + 1] = x.segments[n].of(own[0]) + x.segments[n].of(own[1]);
    block_prefix_sum<THREADS>(upto, all);
    const int end = before[0] + upto[0];
    to[0] = end - own[1] - own[0] + own_before[0];
    to[1] = end - own[1] + own_before[1];
    if (number > 0) return;
    for (int n = 0; n < 3; ++n) {
        i64 *at = (n ? x.segments[n - 1].before : x.begins) + chunk.list + tile;
        const int last = n ? x.segments[n - 1].of(own[1]) : own[1];
        if (chunk.list + tile == 0) at[0] = 0;
        if (tile < tiles) at[1] = before[n] + upto[n] - last;
        if (tile + 1 < tiles) at[2] = before[n] + upto[n];
    }
}

// Return the place of element i of `sorted` in ascending order among entries of its tile that one warp counted at once.
DEVICE int ordered_place(const u32 *sorted, int i, u32 own) {
    int place = i;
    for (int j = i - 1; (sorted[j] ^ own) < 32; --j) place -= sorted[j] > own;
    for (int j = i + 1; (sorted[j] ^ own) < 32; ++j) place += sorted[j] < own;
    return place;
}

extern "C" __global__ void __launch_bounds__(THREADS, FEW ? 3 : 4) sort_scatter(const __grid_constant__ Arguments x) {
    __shared__ Shared shared;
    wait_for_stream();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = x.sort.tiles;
    const Chunk chunk(x.sort, blockIdx.x);
    u32 *sorted = shared.sorted + 1;
    const int *all_tiles = x.tiles + chunk.bg * x.sort.entries_per_bg;
    int to[2];
    if constexpr (FEW) add_counts(x, chunk, to);
    for (u32 first = chunk.first; first < chunk.end; first += BLOCK) {
        const u64 passes = tiles > TABLE ? passes_of(shared, all_tiles, first, chunk.end) : 1;
        for (u32 tile0 = 0; tile0 < tiles; tile0 += TABLE) {
            if (!(passes >> min(tile0 / TABLE, 63u) & 1)) continue;
            const u32 number = warp * (32 * EACH) + lane;  // of the thread's first entry in the block
            u32 own[EACH], ranks[EACH];
            UNROLL for (int i = 0; i < EACH; ++i) {
                const u32 e = first + number + 32 * i;
                own[i] = e < chunk.end ? all_tiles[e] - tile0 : ~0u;
            }
            const i64 tile = tile0 + 2 * threadIdx.x;
            int *counts = x.counts + chunk.counts + tile;
            if constexpr (!FEW)
                for (int i = 0; i < 2; ++i) to[i] = tile + i < tiles ? static_cast<int>(x.begins[chunk.list + tile + i]) + counts[i] : 0;
            for (int i = threadIdx.x; i < WARPS * TABLE / 4; i += THREADS) reinterpret_cast<uint4 *>(shared.counts)[i] = uint4{0, 0, 0, 0};
            __syncthreads();
            UNROLL for (int i = 0; i < EACH; ++i) {
                if (own[i] < TABLE) ranks[i] = atomicAdd(&shared.counts[warp][own[i]], 1u);
                __syncwarp();
            }
            __syncthreads();
            const int listed = offsets_from_counts(shared, to, counts, tiles - tile0, first + BLOCK < chunk.end);
            __syncthreads();
            UNROLL for (int i = 0; i < EACH; ++i)
                if (own[i] < TABLE) sorted[shared.counts[warp][own[i]] + ranks[i]] = own[i] << 16 | (number + 32 * i);
            if (threadIdx.x == 0) sorted[-1] = sorted[listed] = ~0u;
            __syncthreads();
            for (int i = threadIdx.x; i < listed; i += THREADS) {
                const u32 entry = sorted[i];
                x.entries[shared.to[entry >> 16] + ordered_place(sorted, i, entry)] = static_cast<int>(first + (entry & 0xffff));
            }
        }
    }
}
