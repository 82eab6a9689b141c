// Where every list begins, and how many pieces, and parts of lists with several pieces, come before it (lists.py). One thread block: what
// torch would take ten small kernels for, most of whose time is the host's.
#include "common.cuh"

constexpr int THREADS = 512;

struct Arguments {
    const i64 *ends;               // [number, stretches]: entries up to the end of that share of a list
    i64 *begins, *pieces, *parts;  // [number + 1]
    i64 number, stretches, piece;  // lists, shares of one, entries of a piece at most
};

// The sum over the threads up to this one, and over all in `total`. All threads of the block come here.
DEVICE int sum_before(int mine, int (&sums)[THREADS / 32], int &total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int upto = mine;
    for (int gap = 1; gap < 32; gap *= 2) {
        int other = __shfl_up_sync(ALL, upto, gap);
        if (lane >= gap) upto += other;
    }
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    __syncthreads();  // all have read the sums
    return before + upto;
}

extern "C" __global__ void __launch_bounds__(THREADS) split_lists(const __grid_constant__ Arguments x) {
    __shared__ int sums[THREADS / 32];
    i64 pieces = 0, parts = 0;  // of the lists before
    if (threadIdx.x == 0) x.begins[0] = x.pieces[0] = x.parts[0] = 0;
    for (i64 first = 0; first < x.number; first += THREADS) {
        const i64 list = first + threadIdx.x;
        i64 end = 0, begin = 0;
        if (list < x.number) {
            end = x.ends[(list + 1) * x.stretches - 1];
            begin = list ? x.ends[list * x.stretches - 1] : 0;
        }
        const int own = static_cast<int>((end - begin + x.piece - 1) / x.piece);
        int all, several;
        const int pieces_upto = sum_before(own, sums, all), parts_upto = sum_before(own > 1 ? own : 0, sums, several);
        if (list < x.number) {
            x.begins[list + 1] = end;
            x.pieces[list + 1] = pieces + pieces_upto;
            x.parts[list + 1] = parts + parts_upto;
        }
        pieces += all;
        parts += several;
    }
}
