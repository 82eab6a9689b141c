// Merge the results of a cluster's CTAs over their shares of a row's keys, through distributed shared memory.
//
// Every CTA sends each other CTA the partial results for that CTA's columns, and waits for what all others sent to it,
// without a cluster barrier. Sums run over the CTAs in order, so that results are bit-equal from run to run.
//
//   CLUSTER  CTAs of a cluster, which share a row; 1: no clusters
#pragma once
#include "softmax.cuh"
#include "tma.cuh"

// In each CTA's shared memory; `rank` is the number of the CTA that sends.
template <int HEADS>
struct RowCluster {
    static constexpr int OWN = DV / CLUSTER;  // columns that a CTA writes
    float parts[CLUSTER][HEADS][OWN];         // acc of every CTA
    float2 totals[CLUSTER][HEADS];            // m and l
    u64 received;

    // By one thread: what `heads` heads will send is expected.
    DEVICE void init(int heads) {
        mbarrier_init(&received, 1);
        mbarrier_arrive_expect(&received, heads * (DV * 4 + CLUSTER * 8));
    }

    DEVICE void send_columns(u32 rank, int head, int column, float low, float high) {
        store_async(&parts[rank][head][column % OWN], &received, column / OWN, low, high);
    }
    DEVICE void send_columns(u32 rank, int head, int column, float4 four) {
        store_async(&parts[rank][head][column % OWN], &received, column / OWN, four);
    }
    DEVICE void send_totals(u32 rank, int head, u32 to, float m, float l) {
        store_async(reinterpret_cast<float *>(&totals[rank][head]), &received, to, m, l);
    }

    DEVICE void wait() { mbarrier_wait_cluster(&received, 0); }

    // What every CTA's part counts in o; returns lse in base 2.
    DEVICE float weigh(float c, int head, float (&weights)[CLUSTER]) const {
        float m = LOWEST, l = 0.0f;
        UNROLL for (int cta = 0; cta < CLUSTER; ++cta) m = fmaxf(m, totals[cta][head].x);
        UNROLL for (int cta = 0; cta < CLUSTER; ++cta) {
            weights[cta] = exp2_fast((totals[cta][head].x - m) * c);
            l += weights[cta] * totals[cta][head].y;
        }
        const RowTotals row(c, m, l);
        UNROLL for (int cta = 0; cta < CLUSTER; ++cta) weights[cta] *= row.scale;
        return row.lse;
    }

    // Two of this CTA's columns of a head.
    DEVICE float2 combine(const float (&weights)[CLUSTER], int head, int column) const {
        float2 sum = make_float2(0.0f, 0.0f);
        UNROLL for (int cta = 0; cta < CLUSTER; ++cta) {
            const float2 part = *reinterpret_cast<const float2 *>(&parts[cta][head][column]);
            sum.x += weights[cta] * part.x;
            sum.y += weights[cta] * part.y;
        }
        return sum;
    }

    // Write this CTA's columns of `count` heads, once all are received, by THREADS threads. o [HEADS, DV], lse [HEADS].
    template <int THREADS>
    DEVICE void write(float c, u32 rank, int count, u16 *o, float *lse) const {
        constexpr int LANES = THREADS / HEADS;  // of a head
        const int head = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        if (head >= count) return;
        float weights[CLUSTER];
        const float lse_2 = weigh(c, head, weights);
        if (rank == 0 && lane == 0) lse[head] = lse_2 * LN_2;
        for (int column = 2 * lane; column < OWN; column += 2 * LANES) {
            const float2 sum = combine(weights, head, column);
            *reinterpret_cast<u32 *>(o + head * DV + rank * OWN + column) = pack(sum.x, sum.y);
        }
    }
};
