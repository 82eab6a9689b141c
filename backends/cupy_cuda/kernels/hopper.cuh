// PTX instructions of sm_90 as functions: mbarriers, TMA, clusters, named barriers, and register reallocation.
// Tests replace this file by a CPU emulation (tests/helpers/emulation/hopper.cuh).
#pragma once
#include "warp.cuh"

// A CUtensorMap (tensor_map.py).
struct alignas(64) TensorMap {
    char bytes[128];
};

// Initialize an mbarrier. A phase completes after `count` arrivals and all expected bytes; waits name the phase by its
// parity.
DEVICE void mbarrier_init(u64 *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count));
}
DEVICE void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u64 *bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory"); }
DEVICE void mbarrier_arrive_expect(u64 *bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
DEVICE void mbarrier_wait(u64 *bar, int parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(bar)), "r"(parity)
            : "memory");
    } while (!done);
}
// Wait with acquire semantics over the cluster, for data that other CTAs wrote (store_async).
DEVICE void mbarrier_wait_cluster(u64 *bar, int parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(bar)), "r"(parity)
            : "memory");
    } while (!done);
}
// Arrive once all prior cp.async copies of this thread are complete.
DEVICE void cp_async_mbarrier_arrive(u64 *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Make this thread's writes to shared memory visible to TMA and wgmma, after a following barrier.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Split barrier of all threads of a cluster: mbarriers initialized before cluster_arrive are visible to all CTAs after
// cluster_wait.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Return the address of `mine` in the shared memory of CTA `cta` of the cluster.
DEVICE u32 address_in_cta(const void *mine, u32 cta) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(cta));
    return address;
}
// Store two floats to `mine` in the shared memory of CTA `cta`; that CTA's mbarrier `bar` counts the 8 bytes.
DEVICE void store_async(float *mine, u64 *bar, u32 cta, float low, float high) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                     address_in_cta(mine, cta)),
                 "f"(low), "f"(high), "r"(address_in_cta(bar, cta))
                 : "memory");
}
// The same for four floats, 16-byte aligned.
DEVICE void store_async(float *mine, u64 *bar, u32 cta, float4 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address_in_cta(mine, cta)),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(address_in_cta(bar, cta))
                 : "memory");
}

// Named barrier `number` (1 or higher) of THREADS threads (whole warps).
template <int THREADS>
DEVICE void named_barrier(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
// The same; return whether `x` is true for any of the threads.
template <int THREADS>
DEVICE bool named_barrier_any(int number, bool x) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(static_cast<u32>(x)), "r"(number), "n"(THREADS)
                 : "memory");
    return any;
}

DEVICE void tma_prefetch(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// TMA load of the box at (column, key) of k or v [B,G,S_kv,D], or of a page pool with page b. Elements out of bounds
// load as zeros.
DEVICE void tma_load_keys(void *to, const TensorMap *map, u64 *bar, int column, int key, int g, int b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(column), "r"(key), "r"(g), "r"(b)
        : "memory");
}
// TMA load of eight adjacent keys through a map by panels (key_group_map): 64 columns after 64, 1024 bytes each.
DEVICE void tma_load_key_group(void *to, const TensorMap *map, u64 *bar, int key, int g, int b) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %3, %5, %6}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(0), "r"(key), "r"(g), "r"(b)
        : "memory");
}
// `tma_load_keys` for keys that are read once (L2 evict_first).
DEVICE void tma_load_keys_once(void *to, const TensorMap *map, u64 *bar, int column, int key, int g, int b) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n}" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(column), "r"(key), "r"(g), "r"(b)
        : "memory");
}
// TMA load of all heads of adjacent rows, starting at row s, of q or do [B,S,G,h,D].
DEVICE void tma_load_rows(void *to, const TensorMap *map, u64 *bar, int column, int g, int s, int b) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(column), "r"(0), "r"(g), "r"(s), "r"(b)
        : "memory");
}

// Bulk load of contiguous bytes, a multiple of 16, that are read once (L2 evict_first).
DEVICE void bulk_load_once(void *to, const void *from, int bytes, u64 *bar) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(bar))
        : "memory");
}

// cp.async of 4 bytes, or zeros if `exists` is false.
DEVICE void cp_async_4(void *to, const void *from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

// setmaxnreg: give CONSUMER registers per thread to N consumer warpgroups and PRODUCER to the producer warpgroup. All
// threads of a CTA (CTAS per multiprocessor) start with equal shares; the CTA would hang if consumers requested more
// than producers release.
template <int N, int CONSUMER, int PRODUCER, int CTAS = 1>
DEVICE void reallocate_registers(bool consumer) {
    constexpr int SHARE = 65536 / CTAS / (128 * (N + 1)) / 8 * 8;
    static_assert(N * (CONSUMER - SHARE) <= SHARE - PRODUCER, "more registers than there are");
    if (consumer)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER));
}
