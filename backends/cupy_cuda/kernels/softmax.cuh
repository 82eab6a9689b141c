// Online softmax and its gradient on one thread's fragment of an accumulator: two rows r = 0, 1, shared with three
// other lanes (a quad).
//
// Logits s_j arrive tile by tile. A row keeps m = max_j s_j, l = sum_j p_j and acc = sum_j p_j v_j, where
// p_j = 2^(c (s_j - m)). If m rises, l and acc are multiplied by alpha = 2^(c (m_old - m)). At the end o = acc / l and
// lse = c m + log2 l. A row without keys has l = 0 and gives o = 0 and lse = -inf.
//
// mma.sync accumulates in float [N][4], wgmma in float [4 * N]. Element i of row r is in column `column_of(i)` of both.
#pragma once
#include "problem.cuh"

// Initial maximum, below any logit but finite: exp2(-inf - LOWEST) is 0, while exp2(-inf - -inf) would be NaN.
constexpr float LOWEST = -1.0e30f;

template <int N> DEVICE float &element(float (&s)[N][4], int r, int i) { return s[i / 2][2 * r + i % 2]; }
template <int N> DEVICE float &element(float (&s)[N], int r, int i) { return s[i / 2 * 4 + 2 * r + i % 2]; }
DEVICE int column_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <class Tile> constexpr int elements = sizeof(Tile) / sizeof(float) / 2;

// Overwrite elements of row r with `value` where first + column >= limit[r].
template <class Tile> DEVICE void mask_columns(Tile &s, int first, const int (&limit)[2], float value) {
    UNROLL for (int r = 0; r < 2; ++r)
        UNROLL for (int i = 0; i < elements<Tile>; ++i)
            if (first + column_of(i) >= limit[r]) element(s, r, i) = value;
}

// Return the maximum of row r's elements in this thread; four independent chains hide the latency.
template <class Tile> DEVICE float row_max(Tile &s, int r) {
    float tops[4];
    UNROLL for (int i = 0; i < elements<Tile>; ++i) tops[i % 4] = i < 4 ? element(s, r, i) : fmaxf(tops[i % 4], element(s, r, i));
    return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
}

template <class Tile> DEVICE void scale_rows(Tile &acc, const float (&alpha)[2]) {
    UNROLL for (int r = 0; r < 2; ++r)
        UNROLL for (int i = 0; i < elements<Tile>; ++i) element(acc, r, i) *= alpha[r];
}

// Return sum + a . b for two packed 16-bit elements each.
DEVICE float dot2(u32 a, u32 b, float sum) {
    sum += to_float(static_cast<u16>(a)) * to_float(static_cast<u16>(b));
    return sum + to_float(static_cast<u16>(a >> 16)) * to_float(static_cast<u16>(b >> 16));
}

// Replace the logits s by ds = p * (dp - delta), p = 2^(c s - lse); 0 from column `limit` on.
template <class Tile>
DEVICE void logit_gradients(Tile &s, Tile &dp, float c, const float (&lse)[2], const float (&delta)[2], int limit = elements<Tile> * 4) {
    UNROLL for (int i = 0; i < elements<Tile>; i += 2)
        UNROLL for (int r = 0; r < 2; ++r)
            UNROLL for (int j = i; j < i + 2; ++j) {
                const float p = exp2_fast(element(s, r, j) * c - lse[r]);
                element(s, r, j) = column_of(j) < limit ? p * (element(dp, r, j) - delta[r]) : 0.0f;
            }
}

// 1 / l and base-2 lse of a row; 0 and -inf for a row without keys. A NaN in l reaches both.
struct RowTotals {
    float scale, lse;
    DEVICE RowTotals(float c, float m, float l) {
        const bool any_key = !(l == 0.0f);
        scale = any_key ? 1.0f / l : 0.0f;
        lse = any_key ? m * c + log2f(l) : -infinity();
    }
};

struct OnlineSoftmax {
    const float c;  // scale * log2 e
    float m[2] = {LOWEST, LOWEST};
    float l[2] = {0.0f, 0.0f};  // sum over this thread's columns; quad_sum adds the lanes

    DEVICE explicit OnlineSoftmax(float scale_log2) : c(scale_log2) {}

    // Raise row r's maximum to at least `top`; return alpha.
    DEVICE float raise(int r, float top) {
        top = fmaxf(top, m[r]);
        const float alpha = exp2_fast((m[r] - top) * c);
        l[r] *= alpha;
        m[r] = top;
        return alpha;
    }

    // Replace the logits by p. Groups of TOGETHER elements are summed first, which fixes the bits of l.
    template <int TOGETHER, int N> DEVICE void exponentiate(float (&s)[N][4]) {
        const float shift[2] = {m[0] * c, m[1] * c};
        UNROLL for (int i = 0; i < 2 * N; i += TOGETHER)
            UNROLL for (int r = 0; r < 2; ++r) {
                float sum = 0.0f;
                UNROLL for (int j = i; j < i + TOGETHER; ++j) {
                    element(s, r, j) = exp2_fast(element(s, r, j) * c - shift[r]);
                    sum = j == i ? element(s, r, j) : sum + element(s, r, j);
                }
                l[r] += sum;
            }
    }

    // Replace row r's logits by p; return their sum, of four chains. p = 0 if the row does not take part, unless its
    // logits are NaN.
    template <int N> DEVICE float powers(float (&s)[N], int r, bool takes_part) const {
        const float shift = takes_part ? m[r] * c : infinity();
        float sums[4];
        UNROLL for (int i = 0; i < N / 2; ++i) {
            element(s, r, i) = exp2_fast(element(s, r, i) * c - shift);
            sums[i % 4] = i < 4 ? element(s, r, i) : sums[i % 4] + element(s, r, i);
        }
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    // The same, and add the sum to l.
    template <int N> DEVICE void exponentiate(float (&s)[N], int r, bool takes_part) {
        const float sum = powers(s, r, takes_part);
        if (takes_part) l[r] += sum;  // else it is 0, or NaN for non-finite q
    }
};

// Partial result of some of a row's keys, for two adjacent columns of acc, relative to m.
struct PartialSums {
    float m, l, low, high;
};

// Merge partial(0), ..., partial(N - 1) in this order.
template <int N, class Partial> DEVICE PartialSums combine_partials(float c, Partial partial) {
    PartialSums all[N], sum = {LOWEST, 0.0f, 0.0f, 0.0f};
    UNROLL for (int i = 0; i < N; ++i) {
        all[i] = partial(i);
        sum.m = fmaxf(sum.m, all[i].m);
    }
    UNROLL for (int i = 0; i < N; ++i) {
        const float weight = exp2_fast((all[i].m - sum.m) * c);
        sum.l += weight * all[i].l;
        sum.low += weight * all[i].low;
        sum.high += weight * all[i].high;
    }
    return sum;
}
