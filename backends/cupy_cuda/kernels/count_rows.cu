// Count the rows of each chunk that selected any block of each tile (block_tiles.cuh); sum_counts.cu sums the counts.
#include "block_tiles.cuh"
#include "sort.cuh"

constexpr int THREADS = RowMasks::THREADS;

struct Arguments : ChunkArguments {
    i64 published;  // records of sum_counts.cu's CTAs (Published), which follow the counts
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) count_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    u32 *table = reinterpret_cast<u32 *>(memory);
    const u32 lane = threadIdx.x % 32;
    Published *published = reinterpret_cast<Published *>(x.counts + gridDim.x * x.tiles);
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < x.published; i += gridDim.x * THREADS) published[i].ready = 0;
    for_tiles(x, table, [&](u32 tile, i64, int &count, u32) {
        int rows = 0;
        UNROLL for (u32 r = lane; r < CHUNK; r += 32) rows += __popc(__ballot_sync(ALL_LANES, RowMasks::chosen(table, r, tile) != 0));
        if (lane == 0) count = rows;
    });
}
