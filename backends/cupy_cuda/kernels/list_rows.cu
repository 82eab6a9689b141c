// List the rows that selected any block of each tile, in ascending order, with one bit per block (block_tiles.cuh).
#include "block_tiles.cuh"

constexpr int THREADS = RowMasks::THREADS;

struct Arguments : ChunkArguments {
    const i64 *begins;  // [lists + 1]
    int *rows;          // list after list
    u16 *chosen;        // bits of each entry
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) list_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    u32 *table = reinterpret_cast<u32 *>(memory);
    const u32 lane = threadIdx.x % 32;
    for_tiles(x, table, [&](u32 tile, i64 list, int before, u32 first_row) {
        i64 at = x.begins[list] + before;
        UNROLL for (u32 r = lane; r < CHUNK; r += 32) {
            const u32 chosen = RowMasks::chosen(table, r, tile), listed = __ballot_sync(ALL_LANES, chosen != 0);
            if (chosen) {
                const i64 to = at + __popc(listed & ((1u << lane) - 1));
                x.rows[to] = static_cast<int>(first_row + r);
                x.chosen[to] = static_cast<u16>(chosen);
            }
            at += __popc(listed);
        }
    });
}
