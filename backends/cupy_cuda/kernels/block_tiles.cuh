// Tiles of blocks smaller than a tile, and the rows that selected any of a tile's blocks (key_to_rows.py):
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

// A CTA's rows [first, end) of bg, and their selected blocks of the tiles [tile0, tile0 + TABLE) as bits.
template <int THREADS>
struct RowMasks {
    static constexpr int TABLE = 512, PITCH = TABLE / 2 + 1;  // tiles at once; 32-bit words of a row: rows begin in different banks

    // Every bit of `table` [CHUNK][PITCH]. places: of the blocks of bg (order_blocks.cu).
    DEVICE static void mark(const Problem &p, u32 bg, u32 first_row, const int *places, u32 tile0, u32 *table) {
        const u32 n = p.n, G = p.G, b = bg / G, g = bg % G;
        const i64 S = p.S;
        for (int i = threadIdx.x; i < CHUNK * PITCH; i += THREADS) table[i] = 0;
        __syncthreads();
#pragma unroll 4
        for (u32 e = threadIdx.x; e < CHUNK * n; e += THREADS) {
            const u32 r = e / n;
            const i64 s = first_row + r;
            if (s >= S) continue;
            int start, end;
            clamped_range(p, ((b * S + s) * G + g) * n + e % n, row_limit(p, b, s), start, end);
            if (end <= start) continue;
            const u32 place = places[start / SMALL_BLOCK], tile = place / TILE_BLOCKS - tile0;
            if (tile < TABLE) atomicOr(&table[r * PITCH + tile / 2], 1u << (tile % 2 * 16 + place % TILE_BLOCKS));
        }
        __syncthreads();
    }
    // The blocks of a tile that row r of the chunk selected.
    DEVICE static u32 chosen(const u32 *table, u32 r, u32 tile) { return table[r * PITCH + tile / 2] >> tile % 2 * 16 & 0xffff; }
};
