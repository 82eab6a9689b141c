// Counting sort, first step: compute the tile of every entry, and count the entries per chunk and list (sort.cuh).
//
// Grid: one CTA per chunk. Counts of up to TABLE tiles at a time are in shared memory. With reach 1, a range has one
// entry, filed under the last tile that its row sees (key_to_rows.cuh).
//
//   WIDTH, RANGE_BYTES  keys per tile; bytes per bound of a range
#include "sort.cuh"

typedef If<RANGE_BYTES == 4, int, i64> Bound;
constexpr int THREADS = 256, TABLE = 4096, EACH = 4;  // tiles per pass; ranges that a thread loads together

struct Arguments {
    Problem p;
    Sort sort;
    int *tiles;   // [B*G, entries_per_bg]; -1 if the range does not reach that far, or the row may not see it
    int *counts;  // [sections * B*G, chunks, tiles], then the records of sum_counts.cu's CTAs (Published)
    i64 published;  // number of records
};

// Entry e = (s * n + range) * reach + step. `add` advances by THREADS entries without another division.
struct EntryCursor {
    u32 s, range, step;
    DEVICE EntryCursor(u32 n, u32 reach, u32 e) : s(e / reach / n), range(e / reach % n), step(e % reach) {}
    DEVICE void add(const EntryCursor &other, u32 n, u32 reach) {
        step += other.step;
        const bool next = step >= reach;
        step -= next ? reach : 0;
        range += other.range + next;
        const bool over = range >= n;
        range -= over ? n : 0;
        s += other.s + over;
    }
};

// Store the tiles of a chunk's entries, and count those below TABLE; in 32 bits, to save instructions.
DEVICE void find_tiles(const Arguments &x, const Chunk &chunk, int *tiles, int *table) {
    const Problem &p = x.p;
    const u32 n = p.n, reach = x.sort.reach, G = p.G, b = chunk.bg / G, row_ranges = G / SHARED_BY * n;
    const int S_kv = p.S_kv, first_position = static_cast<int>(p.S_kv - p.S);
    const Bound *ranges = reinterpret_cast<const Bound *>(p.ranges) + 2 * ranges_row(b * p.S * G + chunk.bg % G) * p.n;  // of row 0
    const EntryCursor stride(n, reach, THREADS);
    EntryCursor at(n, reach, chunk.first + threadIdx.x);
    for (u32 first = chunk.first + threadIdx.x; first < chunk.end; first += EACH * THREADS) {
        Bound begins[EACH], stops[EACH];
        u32 rows[EACH], steps[EACH];
        UNROLL for (int i = 0; i < EACH; ++i) {
            rows[i] = at.s, steps[i] = at.step;
            const Bound *range = ranges + static_cast<u64>(at.s * row_ranges + at.range) * 2;
            const bool exists = first + i * THREADS < chunk.end;
            begins[i] = exists ? range[0] : 0;
            stops[i] = exists ? range[1] : 0;
            at.add(stride, n, reach);
        }
        UNROLL for (int i = 0; i < EACH; ++i) {
            const u32 e = first + i * THREADS;
            if (e >= chunk.end) break;
            const int limit = p.q_pos ? row_limit(p, b, rows[i]) : max(0, min(first_position + static_cast<int>(rows[i]), S_kv - 1) + 1);
            int start, end;
            clamp_bounds(begins[i], stops[i], limit, start, end);
            const u32 last = static_cast<u32>(end - 1) / WIDTH;
            u32 tile = reach == 1 ? last : static_cast<u32>(start) / WIDTH + steps[i];
            if (end <= start || tile > last) tile = ~0u;
            tiles[e] = static_cast<int>(tile);
            if (tile < TABLE) atomicAdd(table + tile, 1);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 5) sort_count(const __grid_constant__ Arguments x) {
    __shared__ int table[TABLE];
    wait_for_stream();
    const Chunk chunk(x.sort, blockIdx.x);
    int *tiles = x.tiles + chunk.bg * x.sort.entries_per_bg;
    Published *published = reinterpret_cast<Published *>(x.counts + gridDim.x * x.sort.tiles);
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < x.published; i += gridDim.x * THREADS) published[i].ready = 0;
    for (u32 tile0 = 0; tile0 < x.sort.tiles; tile0 += TABLE) {
        const u32 in_table = min(static_cast<u32>(TABLE), static_cast<u32>(x.sort.tiles) - tile0);
        for (u32 i = threadIdx.x; i < in_table; i += THREADS) table[i] = 0;
        __syncthreads();
        if (tile0 == 0) find_tiles(x, chunk, tiles, table);
        else
            for (u32 e = chunk.first + threadIdx.x; e < chunk.end; e += THREADS) {  // written by the same thread in find_tiles
                const u32 i = static_cast<u32>(tiles[e]) - tile0;
                if (tiles[e] >= 0 && i < TABLE) atomicAdd(table + i, 1);
            }
        __syncthreads();
        for (u32 i = threadIdx.x; i < in_table; i += THREADS) x.counts[chunk.counts + tile0 + i] = table[i];
        __syncthreads();
    }
}
