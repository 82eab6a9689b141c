// The key by which the (row, range) pairs are sorted into the lists of the KV tiles that they reach into.
//
// Entry e of the pair bg = b * G + g is (s * n + range) * REACH + step: row s, and the step-th tile of WIDTH keys that the range meets.
// Its key is the list number bg * tiles + tile; `none`, one past the last list, where the range does not reach that far or the row may
// not see it. A stable sort then keeps each list in ascending order of rows.
#include "common.cuh"

struct Arguments {
    Problem p;
    int *list;  // [B*G*S*n*reach]
    i64 entries, each, reach, width, tiles, none;
};

extern "C" __global__ void __launch_bounds__(256) entries(const __grid_constant__ Arguments x) {
    const Problem &p = x.p;
    i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= x.entries) return;
    i64 bg = i / x.each, e = i % x.each;
    i64 b = bg / p.G, g = bg % p.G, s = e / (p.n * x.reach);
    int start, end;
    clamped_range(p, ((b * p.S + s) * p.G + g) * p.n + e / x.reach % p.n, row_limit(p, b, s), start, end);
    i64 tile = start / x.width + e % x.reach;
    x.list[i] = end > start && tile * x.width < end ? bg * x.tiles + tile : x.none;
}
