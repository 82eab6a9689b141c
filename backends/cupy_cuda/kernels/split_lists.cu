// How many segments, and segments of lists that have several, come before every list: two prefix sums.
//
// Grid: one CTA. In torch this is ten small kernels, most of whose time is the host's.
#include "key_to_rows.cuh"

constexpr int THREADS = 512, EACH = 8;  // lists of a thread

struct Arguments {
    const i64 *begins;       // [lists + 1]: see KeyToRows
    i64 *segments, *parts;   // [lists + 1]
    i64 lists, segment;      // entries of a segment at most
};

extern "C" __global__ void __launch_bounds__(THREADS) split_lists(const __grid_constant__ Arguments x) {
    wait_for_stream();
    i64 segments = 0, parts = 0;  // of the lists before
    const u32 segment = x.segment;
    if (threadIdx.x == 0) x.segments[0] = x.parts[0] = 0;
    for (i64 first = 0; first < x.lists; first += THREADS * EACH) {
        const i64 list = first + threadIdx.x * EACH;
        i64 begins[EACH + 1];
        int own[EACH], sums[2] = {0, 0}, total[2];
#pragma unroll
        for (int i = 0; i <= EACH; ++i) begins[i] = x.begins[min(list + i, x.lists)];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            own[i] = static_cast<int>((static_cast<u32>(begins[i + 1] - begins[i]) + segment - 1) / segment);
            sums[0] += own[i];
            sums[1] += own[i] > 1 ? own[i] : 0;
        }
        i64 end[2] = {segments - sums[0], parts - sums[1]};
        block_prefix_sum<THREADS>(sums, total);
        for (int i = 0; i < 2; ++i) end[i] += sums[i];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            end[0] += own[i];
            end[1] += own[i] > 1 ? own[i] : 0;
            if (list + i >= x.lists) break;
            x.segments[list + i + 1] = end[0];
            x.parts[list + i + 1] = end[1];
        }
        segments += total[0];
        parts += total[1];
    }
}
