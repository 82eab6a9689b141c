// Tiles of blocks smaller than a tile, and the rows that selected any of a tile's blocks (block_tiles.py):
// count_blocks.cu counts how many sampled rows selected each block, order_blocks.cu assigns blocks to tiles,
// count_rows.cu counts each tile's rows per chunk of rows, sum_counts.cu sums the counts, and list_rows.cu lists the
// rows of every tile, with one bit per block.
//
// A row seldom selects all blocks of 64 adjacent keys. Blocks that many rows select therefore share tiles, and so do
// blocks that few rows select, in the order of their positions, because neighboring rows select neighboring blocks.
#pragma once
#include "key_to_rows.cuh"

constexpr int CHUNK = 64;  // rows

// The selected blocks of a CTA's rows, as bits of tiles [tile0, tile0 + TABLE) in shared memory. TABLE is even.
struct RowMasks {
    static constexpr int THREADS = 512, PITCH = TABLE / 2 + 1;  // 32-bit words of a row: rows begin in different banks

    // Set the bits of `table` [CHUNK][PITCH], one warp per row. places: slots of the blocks of bg (order_blocks.cu).
    DEVICE static void mark(const Problem &p, u32 bg, u32 first_row, const int *places, u32 tile0, u32 *table) {
        constexpr int EACH = 8;  // ranges that a lane loads together
        const u32 n = p.n, G = p.G, b = bg / G, g = bg % G, lane = threadIdx.x % 32;
        for (int i = threadIdx.x; i < CHUNK * PITCH; i += THREADS) table[i] = 0;
        __syncthreads();
        for (u32 r = threadIdx.x / 32; r < CHUNK && first_row + r < p.S; r += THREADS / 32) {
            const i64 s = first_row + r, first_range = ((b * p.S + s) * G + g) * n;
            const int limit = row_limit(p, b, s);
            for (u32 first = lane; first - lane < n; first += 32 * EACH) {
                Range ranges[EACH];
                int at[EACH];
                UNROLL for (int i = 0; i < EACH; ++i) ranges[i] = first + 32 * i < n ? Range(p, range_at(p, first_range + first + 32 * i)) : Range();
                UNROLL for (int i = 0; i < EACH; ++i) {
                    int start, end;
                    ranges[i].clamp(p, limit, start, end);
                    at[i] = end > start ? places[start / SMALL_BLOCK] : -1;
                }
                UNROLL for (int i = 0; i < EACH; ++i) {
                    const u32 place = at[i], tile = place / TILE_BLOCKS - tile0;
                    if (at[i] >= 0 && tile < TABLE) atomicOr(&table[r * PITCH + tile / 2], 1u << (tile % 2 * 16 + place % TILE_BLOCKS));
                }
            }
        }
        __syncthreads();
    }
    // Return the blocks of a tile that row r of the chunk selected, as bits.
    DEVICE static u32 chosen(const u32 *table, u32 r, u32 tile) { return table[r * PITCH + tile / 2] >> tile % 2 * 16 & 0xffff; }
};

// The CTA's chunk of rows: one CTA per (b, g, chunk).
struct ChunkArguments {
    Problem p;
    const int *places;  // [B*G, blocks]
    i64 blocks, tiles, chunks;
    int *counts;  // [B*G, chunks, tiles]; after sum_counts.cu the list's rows in earlier chunks
};
// Call use(tile, list, count, first_row) for every tile, by one warp each. tile: its number in `table`.
template <class Use> DEVICE void for_tiles(const ChunkArguments &x, u32 *table, Use use) {
    const u32 chunks = x.chunks, tiles = x.tiles, bg = blockIdx.x / chunks, first_row = blockIdx.x % chunks * CHUNK;
    for (u32 tile0 = 0; tile0 < tiles; tile0 += TABLE) {
        RowMasks::mark(x.p, bg, first_row, x.places + bg * x.blocks, tile0, table);
        for (u32 tile = threadIdx.x / 32; tile < min(tiles - tile0, static_cast<u32>(TABLE)); tile += RowMasks::THREADS / 32)
            use(tile, bg * x.tiles + tile0 + tile, x.counts[blockIdx.x * x.tiles + tile0 + tile], first_row);
        __syncthreads();
    }
}
