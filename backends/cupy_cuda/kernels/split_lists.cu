// Where every list begins, and how many segments, and segments of lists that have several, come before it: three prefix sums.
//
// Grid: one CTA. In torch this is ten small kernels, most of whose time is the host's.
#include "key_to_rows.cuh"

constexpr int THREADS = 512;

struct Arguments {
    const i64 *ends;                     // [lists, chunks]: see sort_scatter.cu
    i64 *begins, *segments, *parts;      // [lists + 1]: see KeyToRows
    i64 lists, chunks, segment;  // entries of a segment at most
};

extern "C" __global__ void __launch_bounds__(THREADS) split_lists(const __grid_constant__ Arguments x) {
    i64 segments = 0, parts = 0;  // of the lists before
    if (threadIdx.x == 0) x.begins[0] = x.segments[0] = x.parts[0] = 0;
    for (i64 first = 0; first < x.lists; first += THREADS) {
        const i64 list = first + threadIdx.x;
        i64 end = 0, begin = 0;
        if (list < x.lists) {
            end = x.ends[(list + 1) * x.chunks - 1];
            begin = list ? x.ends[list * x.chunks - 1] : 0;
        }
        const int own = static_cast<int>((end - begin + x.segment - 1) / x.segment);
        int upto[2] = {own, own > 1 ? own : 0}, total[2];
        block_prefix_sum<THREADS>(upto, total);
        if (list < x.lists) {
            x.begins[list + 1] = end;
            x.segments[list + 1] = segments + upto[0];
            x.parts[list + 1] = parts + upto[1];
        }
        segments += total[0];
        parts += total[1];
    }
}
