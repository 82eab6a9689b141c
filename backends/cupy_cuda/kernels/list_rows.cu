// List the rows that selected any block of each tile, in ascending order, with one bit per block (block_tiles.cuh).
//
// Grid: one CTA per (b, g, chunk of rows); a warp per tile.
#include "block_tiles.cuh"

constexpr int THREADS = RowMasks::THREADS;

struct Arguments {
    Problem p;
    const int *places;  // [B*G, blocks]
    i64 blocks, tiles, chunks;
    const int *counts;  // from sum_counts.cu
    const i64 *begins;  // [lists + 1]
    int *rows;          // list after list
    u16 *chosen;        // bits of each entry
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) list_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    u32 *table = reinterpret_cast<u32 *>(memory);
    const u32 chunks = x.chunks, tiles = x.tiles, bg = blockIdx.x / chunks, lane = threadIdx.x % 32;
    const u32 first_row = blockIdx.x % chunks * CHUNK;
    for (u32 tile0 = 0; tile0 < tiles; tile0 += TABLE) {
        RowMasks::mark(x.p, bg, first_row, x.places + bg * x.blocks, tile0, table);
        for (u32 tile = threadIdx.x / 32; tile < min(tiles - tile0, static_cast<u32>(TABLE)); tile += THREADS / 32) {
            i64 at = x.begins[bg * x.tiles + tile0 + tile] + x.counts[blockIdx.x * x.tiles + tile0 + tile];
            UNROLL for (u32 r = lane; r < CHUNK; r += 32) {
                const u32 chosen = RowMasks::chosen(table, r, tile), listed = __ballot_sync(ALL_LANES, chosen != 0);
                if (chosen) {
                    const i64 to = at + __popc(listed & ((1u << lane) - 1));
                    x.rows[to] = static_cast<int>(first_row + r);
                    x.chosen[to] = static_cast<u16>(chosen);
                }
                at += __popc(listed);
            }
        }
        __syncthreads();
    }
}
