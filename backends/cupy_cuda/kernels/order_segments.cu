// Order the segments of lists for the CTAs of dkdv_groups.cu and block_gradients.cu: by stretch, so that those that
// share rows run at about the same time and read q and do from the L2 cache, and longest first within a stretch, so
// that short ones fill the gaps at the end. The order changes no result. A stretch is the segments that begin within a
// range of rows, counted over all (b, g). BY_UNITS (block_gradients.cu): it is some pairs (b, g) of a unit
// (_triton/units.py), and each unit is ordered separately.
//
// Grid: one CTA, or one per unit. A counting sort; segments with the same key come in any order.
#include "key_to_rows.cuh"

constexpr int THREADS = 1024, AT_ONCE = 4;         // segments that a thread looks up together, because each is a chain of loads
constexpr int LENGTHS = 16, MOST_STRETCHES = 256;  // length classes; most stretches, as in sm90.py
constexpr int COUNTED = LENGTHS * MOST_STRETCHES, EACH = COUNTED / THREADS;

struct Arguments {
    KeyToRows all;         // BY_UNITS: entries and parts are not read
    i64 pairs_all, pairs;  // BY_UNITS: pairs per section of rows, and per unit
    i64 S, each;           // else: rows, and entries per row
    i64 stretch;           // pairs per stretch (BY_UNITS), else rows
    uint2 *order;          // [segments]: list and number of each, in order
};

struct Lists {
    const Arguments &x;
    u32 first, count;  // lists
    u32 base;          // segments of earlier lists
    u32 segments;      // segments of these lists

    DEVICE Lists(const Arguments &arguments) : x(arguments) {
        first = 0;
        count = static_cast<u32>(x.all.lists);
        if (BY_UNITS) {
            const u32 pairs_all = x.pairs_all, pairs = x.pairs, units = (pairs_all + pairs - 1) / pairs, pair = blockIdx.x % units * pairs;
            first = (blockIdx.x / units * pairs_all + pair) * static_cast<u32>(x.all.tiles);
            count = min(pairs, pairs_all - pair) * static_cast<u32>(x.all.tiles);
        }
        base = static_cast<u32>(x.all.segments[first]);
        segments = static_cast<u32>(x.all.segments[first + count]) - base;
    }
    DEVICE u32 stretch_of(u32 list, i64 begin) const {
        const u32 pair = (list - first) / static_cast<u32>(x.all.tiles), stretch = static_cast<u32>(x.stretch);
        if (BY_UNITS) return pair / stretch;
        const u32 row = static_cast<u32>(x.all.entries[begin]) / static_cast<u32>(x.each);
        return static_cast<u32>(pair * x.S + row) / stretch;
    }
};

// A thread's segments of a round, and their keys.
struct Found {
    u32 list[AT_ONCE], number[AT_ONCE];
    int key[AT_ONCE];  // negative: there is no such segment

    DEVICE Found(const Lists &lists, u32 round) {
        const KeyToRows &all = lists.x.all;
        const u32 most = static_cast<u32>(all.segment), end = lists.first + lists.count;
        u32 index[AT_ONCE];
        UNROLL for (int j = 0; j < AT_ONCE; ++j) {
            index[j] = (round * AT_ONCE + j) * THREADS + threadIdx.x;
            list[j] = lists.first;
        }
        u32 span = 1;
        while (span < lists.count) span *= 2;
        while (span /= 2)  // the last list whose segments begin at or before `index`
            UNROLL for (int j = 0; j < AT_ONCE; ++j) {
                const u32 middle = min(list[j] + span, end);
                if (middle < end && all.segments[middle] <= lists.base + index[j]) list[j] = middle;
            }
        i64 begin[AT_ONCE];
        u32 entries[AT_ONCE];
        UNROLL for (int j = 0; j < AT_ONCE; ++j) {
            number[j] = index[j] < lists.segments ? lists.base + index[j] - static_cast<u32>(all.segments[list[j]]) : 0;
            begin[j] = all.begins[list[j]] + number[j] * all.segment;
            entries[j] = static_cast<u32>(min(all.end(list[j]) - begin[j], all.segment));
        }
        UNROLL for (int j = 0; j < AT_ONCE; ++j) {
            const u32 shortness = LENGTHS - 1 - (entries[j] * LENGTHS - 1) / most;
            key[j] = index[j] < lists.segments ? static_cast<int>(lists.stretch_of(list[j], begin[j]) * LENGTHS + shortness) : -1;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) order_segments(const __grid_constant__ Arguments x) {
    __shared__ int next[COUNTED];  // segments per key; then the position of the next one
    const Lists lists(x);
    const u32 rounds = (lists.segments + AT_ONCE * THREADS - 1) / (AT_ONCE * THREADS);
    for (int i = threadIdx.x; i < COUNTED; i += THREADS) next[i] = 0;
    __syncthreads();
    Found found(lists, 0);
    for (u32 round = 0; round < rounds; ++round) {
        if (round) found = Found(lists, round);
        UNROLL for (int j = 0; j < AT_ONCE; ++j)
            if (found.key[j] >= 0) atomicAdd(&next[found.key[j]], 1);
    }
    __syncthreads();
    int own[EACH], sum = 0, all[1];
    UNROLL for (int i = 0; i < EACH; ++i) sum += own[i] = next[threadIdx.x * EACH + i];
    int upto[1] = {sum};
    block_prefix_sum<THREADS>(upto, all);
    int before = static_cast<int>(lists.base) + upto[0] - sum;
    UNROLL for (int i = 0; i < EACH; ++i) {
        next[threadIdx.x * EACH + i] = before;
        before += own[i];
    }
    __syncthreads();
    for (u32 round = rounds; round-- > 0;) {  // `found` still holds the last round
        if (round + 1 < rounds) found = Found(lists, round);
        UNROLL for (int j = 0; j < AT_ONCE; ++j)
            if (found.key[j] >= 0) x.order[atomicAdd(&next[found.key[j]], 1)] = make_uint2(found.list[j], found.number[j]);
    }
}
