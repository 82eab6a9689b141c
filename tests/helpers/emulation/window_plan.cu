// What the kernels of a window go through, written to memory: the steps of every tile of tokens, and the rows of every tile of keys.
#include "hardware.cuh"
#include "key_to_rows.cuh"
#include "tile_plan.cuh"

struct Arguments {
    Problem p;
    TilePlan plan;
    i64 key_tiles;
    int *steps;  // [tiles, 2 + capacity]: whole blocks, all blocks, the first key of each in the order of the steps
    int *rows;   // [key_tiles, 4 + capacity]: the first row, how many, begun and over, the steps in their order
};

extern "C" __global__ void window_plan(const Arguments x) {
    if (threadIdx.x) return;
    const int number = blockIdx.x;
    if (number < x.plan.tiles) {
        const TokenTile tile(number, x.plan, x.p.G);
        const int2 counts = Union::block_counts(x.p, x.plan, tile);
        int *to = x.steps + tile.i * (2 + x.plan.capacity);
        to[0] = counts.x, to[1] = counts.y;
        for (int e = 0; e < counts.y; ++e) to[2 + e] = Union::block_key(x.p, x.plan, tile, list_offset(counts, e));
    }
    if (number < x.key_tiles) {
        const WindowRows<BLOCK, TQ> rows(x.p, static_cast<i64>(number) * BLOCK);
        int *to = x.rows + number * (4 + x.plan.capacity);
        to[0] = rows.first, to[1] = rows.count, to[2] = rows.begun, to[3] = rows.over;
        for (int i = 0; i < rows.steps; ++i) to[4 + i] = rows.step_at(i);
    }
}
