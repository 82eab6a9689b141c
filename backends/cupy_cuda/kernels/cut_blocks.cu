// Count the segments of every tile's list if the tiles of a block share one list (key_to_rows.cuh). Grid: one CTA; a
// thread takes EACH adjacent lists per round.
#include "key_to_rows.cuh"
#include "sort.cuh"

constexpr int THREADS = 1024, EACH = 4;  // lists that a thread looks up together

struct Arguments {
    KeyToRows lists;       // without segments and parts
    Segments segments[2];  // segments and parts, computed here
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) cut_blocks(const __grid_constant__ Arguments x) {
    wait_for_stream();
    const u32 lists = x.lists.lists;
    i64 before[2] = {0, 0};  // of the lists of earlier rounds
    if (threadIdx.x < 2) x.segments[threadIdx.x].before[0] = 0;
    for (u32 first = 0; first < lists; first += EACH * THREADS) {
        const u32 list = first + EACH * threadIdx.x;
        int entries[EACH], upto[2] = {0, 0}, all[2];
        UNROLL for (u32 i = 0; i < EACH; ++i) entries[i] = list + i < lists ? static_cast<int>(x.lists.end(list + i) - x.lists.begins[list + i]) : 0;
        for (int n = 0; n < 2; ++n)
            for (int i = 0; i < EACH; ++i) upto[n] += x.segments[n].of(entries[i]);
        int own[2] = {upto[0], upto[1]};
        block_prefix_sum<THREADS>(upto, all);
        for (int n = 0; n < 2; ++n) {
            i64 sum = before[n] + upto[n] - own[n];
            for (u32 i = 0; i < EACH; ++i) {
                sum += x.segments[n].of(entries[i]);
                if (list + i < lists) x.segments[n].before[list + i + 1] = sum;
            }
            before[n] += all[n];
        }
    }
}
