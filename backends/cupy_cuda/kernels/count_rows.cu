// Count the rows of each chunk that selected any block of each tile (block_tiles.cuh); sum_counts.cu sums the counts.
//
// Grid: one CTA per (b, g, chunk of rows); a warp per tile.
#include "block_tiles.cuh"
#include "sort.cuh"

constexpr int THREADS = RowMasks::THREADS;

struct Arguments {
    Problem p;
    const int *places;  // [B*G, blocks]
    i64 blocks, tiles, chunks;
    int *counts;    // [B*G, chunks, tiles], then the records of sum_counts.cu's CTAs (Published)
    i64 published;  // number of records
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) count_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    u32 *table = reinterpret_cast<u32 *>(memory);
    const u32 chunks = x.chunks, tiles = x.tiles, bg = blockIdx.x / chunks, lane = threadIdx.x % 32;
    Published *published = reinterpret_cast<Published *>(x.counts + gridDim.x * x.tiles);
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < x.published; i += gridDim.x * THREADS) published[i].ready = 0;
    for (u32 tile0 = 0; tile0 < tiles; tile0 += TABLE) {
        RowMasks::mark(x.p, bg, blockIdx.x % chunks * CHUNK, x.places + bg * x.blocks, tile0, table);
        for (u32 tile = threadIdx.x / 32; tile < min(tiles - tile0, static_cast<u32>(TABLE)); tile += THREADS / 32) {
            int rows = 0;
            UNROLL for (u32 r = lane; r < CHUNK; r += 32) rows += __popc(__ballot_sync(ALL_LANES, RowMasks::chosen(table, r, tile) != 0));
            if (lane == 0) x.counts[blockIdx.x * x.tiles + tile0 + tile] = rows;
        }
        __syncthreads();
    }
}
