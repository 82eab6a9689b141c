// Add the partial sums of dk and dv of a unit's lists with several segments, in order, to the sums of earlier sections.
// Store zeros for tiles that no row selected. A list with one segment adds its sums itself (block_gradients.cu).
//
// Grid: one CTA per (list, KEYS keys), as in sum_parts.cu.
#include "key_to_rows.cuh"

constexpr int THREADS = 128;

struct Arguments {
    Problem p;
    UnitGradients to;
};

template <int D>
DEVICE void sum(const Arguments &x, const float *parts, float *sums, u16 *result, int segments, i64 keys_left, float scale) {
    for (int i = threadIdx.x; i < KEYS * (D / 4); i += THREADS) {
        const int at = i * 4;
        float4 total = x.to.adds ? *reinterpret_cast<const float4 *>(sums + at) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        total = add_parts(total, parts + at, segments, 64 * D);
        if (!x.to.final) *reinterpret_cast<float4 *>(sums + at) = total;
        else if (at / D < keys_left)
            *reinterpret_cast<uint2 *>(result + at) = make_uint2(pack(total.x * scale, total.y * scale), pack(total.z * scale, total.w * scale));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_sections(const __grid_constant__ Arguments x) {
    const UnitLists &lists = x.to.lists;
    const i64 number = lists.first_list + blockIdx.x / (64 / KEYS), within = blockIdx.x % (64 / KEYS) * KEYS;
    const UnitList list(lists, number);
    if (list.segments == 1 || (list.segments == 0 && x.to.adds && !x.to.final)) return;
    const i64 part = (lists.segments[number] - lists.segments[lists.first_list]) * 64 + within, row = list.sum_row(lists) + within;
    const i64 key = list.tile * 64 + within, at = list.pair * x.p.S_kv + key;
    sum<DK>(x, x.to.part_dk + part * DK, x.to.sum_dk + row * DK, x.to.dk + at * DK, list.segments, x.p.S_kv - key, static_cast<float>(x.p.scale));
    sum<DV>(x, x.to.part_dv + part * DV, x.to.sum_dv + row * DV, x.to.dv + at * DV, list.segments, x.p.S_kv - key, 1.0f);
}
