// What the CTAs of a cluster found over their shares of a row's keys, combined through distributed shared memory.
//
// Every CTA sends each other one what it has for that one's columns, and waits for what all sent to it: one way, no barrier of the cluster.
// Sums are over the CTAs in their order, so that results repeat bit by bit.
//
//   CLUSTER  CTAs of a cluster, which share a row; 1: no clusters
#pragma once
#include "softmax.cuh"
#include "tma.cuh"

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

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
    DEVICE void send_totals(u32 rank, int head, u32 to, float m, float l) {
        store_async(reinterpret_cast<float *>(&totals[rank][head]), &received, to, m, l);
    }

    DEVICE void wait() { mbarrier_wait_cluster(&received, 0); }

    // Two of this CTA's columns of a head.
    DEVICE PartialSums combine(float c, int head, int column) const {
        return combine_partials<CLUSTER>(c, [&](int cta) {
            const float2 total = totals[cta][head], part = *reinterpret_cast<const float2 *>(&parts[cta][head][column]);
            return PartialSums{total.x, total.y, part.x, part.y};
        });
    }
};
