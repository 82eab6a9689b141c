// Counting sort, second step: where the entries of every list from every chunk of rows end, a prefix sum of the counts of sort_rank.cu.
//
// Grid: one CTA, for tables that it goes over in a few rounds. In torch this is two kernels, and as much of the host's time as four launches.
#include "key_to_rows.cuh"

constexpr int THREADS = 512, EACH = 8;  // counts of a thread

struct Arguments {
    const int *counts;  // [total]
    i64 *ends;          // [total]
    i64 total;
};

extern "C" __global__ void __launch_bounds__(THREADS) sum_counts(const __grid_constant__ Arguments x) {
    i64 before = 0;
    for (i64 first = 0; first < x.total; first += THREADS * EACH) {
        const i64 at = first + threadIdx.x * EACH;
        int own[EACH], sum = 0;
        for (int i = 0; i < EACH; ++i) {
            own[i] = at + i < x.total ? x.counts[at + i] : 0;
            sum += own[i];
        }
        int upto[1] = {sum}, all[1];
        block_prefix_sum<THREADS>(upto, all);
        i64 end = before + upto[0] - sum;
        for (int i = 0; i < EACH; ++i) {
            end += own[i];
            if (at + i < x.total) x.ends[at + i] = end;
        }
        before += all[0];
    }
}
