// Tiles of blocks smaller than a tile, and the rows that selected any of a tile's blocks (block_tiles.py):
//   count_blocks.cu   how many of some rows selected each block
//   order_blocks.cu   the blocks of every tile
//   count_rows.cu     how many rows each tile has in each chunk of rows
//   sum_counts.cu     where these begin, and the segments of every list
//   list_rows.cu      the rows of every tile, with a bit for each of its blocks
//
// Adjacent blocks are seldom all selected by a row: of the blocks of a tile of 64 keys most rows would select few. Blocks that many rows
// select share tiles, and so do those that few do, in the order of their positions: neighbors are selected by neighbors.
#pragma once
#include "key_to_rows.cuh"

constexpr int CHUNK = 64;  // rows

// The selected blocks of a CTA's rows, as bits of the tiles [tile0, tile0 + TABLE) in shared memory.
//
//   TABLE  tiles at once, a multiple of 2
struct RowMasks {
    static constexpr int THREADS = 512, PITCH = TABLE / 2 + 1;  // 32-bit words of a row: rows begin in different banks

    // Every bit of `table` [CHUNK][PITCH], a warp per row. places: of the blocks of bg (order_blocks.cu).
    DEVICE static void mark(const Problem &p, u32 bg, u32 first_row, const int *places, u32 tile0, u32 *table) {
        constexpr int EACH = 8;  // ranges of a lane that are loaded together
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
    // The blocks of a tile that row r of the chunk selected.
    DEVICE static u32 chosen(const u32 *table, u32 r, u32 tile) { return table[r * PITCH + tile / 2] >> tile % 2 * 16 & 0xffff; }
};
