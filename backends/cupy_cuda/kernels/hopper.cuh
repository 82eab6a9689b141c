// PTX instructions of sm_90 as functions: mbarriers, TMA, clusters, named barriers, register reallocation, and wgmma.
// Tests replace this file by a CPU emulation (tests/helpers/emulation/hopper.cuh).
#pragma once
#include "warp.cuh"

// A CUtensorMap (tensor_map.py).
struct alignas(64) TensorMap {
    char bytes[128];
};

// A phase of an mbarrier completes after `count` arrivals and all expected bytes; waits name the phase by its parity.
DEVICE void mbarrier_init(u64 *bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count));
}
DEVICE void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u64 *bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory"); }
DEVICE void mbarrier_arrive_expect(u64 *bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
#define MBARRIER_TRY_WAIT(SCOPE) \
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity" SCOPE ".shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" \
                 : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory")
DEVICE void mbarrier_wait(u64 *bar, int parity) {
    u32 done;
    do MBARRIER_TRY_WAIT(""); while (!done);
}
// Wait with acquire semantics over the cluster, for data that other CTAs wrote (store_async).
DEVICE void mbarrier_wait_cluster(u64 *bar, int parity) {
    u32 done;
    do MBARRIER_TRY_WAIT(".acquire.cluster"); while (!done);
}
// Arrive once all prior cp.async copies of this thread are complete.
DEVICE void cp_async_mbarrier_arrive(u64 *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Make this thread's writes to shared memory visible to TMA and wgmma, after a following barrier.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Split barrier of a cluster: mbarriers initialized before cluster_arrive are visible to all CTAs after cluster_wait.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Return the address of `mine` in the shared memory of CTA `cta` of the cluster.
DEVICE u32 address_in_cta(const void *mine, u32 cta) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(cta));
    return address;
}
// Store floats to `mine` in the shared memory of CTA `cta`, aligned to their bytes, which its mbarrier `bar` counts.
#define STORE_ASYNC(TYPE, NAMES, BAR, ...) \
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes." TYPE " [%0], {" NAMES "}, [%" BAR "];" \
                 ::"r"(address_in_cta(mine, cta)), __VA_ARGS__, "r"(address_in_cta(bar, cta)) : "memory")
DEVICE void store_async(float *mine, u64 *bar, u32 cta, float low, float high) {
    STORE_ASYNC("v2.f32", "%1, %2", "3", "f"(low), "f"(high));
}
DEVICE void store_async(float *mine, u64 *bar, u32 cta, float4 x) {
    STORE_ASYNC("v4.f32", "%1, %2, %3, %4", "5", "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w));
}

// Named barrier `number` (1 or higher) of THREADS threads (whole warps).
template <int THREADS>
DEVICE void named_barrier(int number) { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory"); }
// The same; return whether `x` is true for any of the threads.
template <int THREADS> DEVICE bool named_barrier_any(int number, bool x) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(static_cast<u32>(x)), "r"(number), "n"(THREADS)
                 : "memory");
    return any;
}

DEVICE void tma_prefetch(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// TMA load of a box of DIMS dimensions. COORDINATES: innermost first, as operands %3, %4, ... of the asm statement.
#define TMA_LOAD(DIMS, COORDINATES, ...) \
    asm volatile("cp.async.bulk.tensor." DIMS ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {" COORDINATES "}], [%2];" \
                 ::"r"(shared_address(to)), "l"(map), "r"(shared_address(bar)), __VA_ARGS__ : "memory")
#define EVICT_FIRST "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"  // for bytes that are read once

// Load the box at (column, key) of k or v [B,G,S_kv,D], or of page b of a page pool. Out of bounds it is zeros.
DEVICE void tma_load_keys(void *to, const TensorMap *map, u64 *bar, int column, int key, int g, int b) {
    TMA_LOAD("4d", "%3, %4, %5, %6", "r"(column), "r"(key), "r"(g), "r"(b));
}
// Load eight adjacent keys through a map by panels (key_group_map): 64 columns after 64, 1024 bytes each.
DEVICE void tma_load_key_group(void *to, const TensorMap *map, u64 *bar, int key, int g, int b) {
    TMA_LOAD("5d", "%3, %4, %3, %5, %6", "r"(0), "r"(key), "r"(g), "r"(b));
}
// Load all heads of adjacent rows, starting at row s, of q or do [B,S,G,h,D].
DEVICE void tma_load_rows(void *to, const TensorMap *map, u64 *bar, int column, int g, int s, int b) {
    TMA_LOAD("5d", "%3, %4, %5, %6, %7", "r"(column), "r"(0), "r"(g), "r"(s), "r"(b));
}
// `tma_load_keys` for keys that are read once.
DEVICE void tma_load_keys_once(void *to, const TensorMap *map, u64 *bar, int column, int key, int g, int b) {
    asm volatile(EVICT_FIRST "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n}" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(bar)), "r"(column), "r"(key), "r"(g), "r"(b)
                 : "memory");
}
// Load contiguous bytes, a multiple of 16, that are read once.
DEVICE void bulk_load_once(void *to, const void *from, int bytes, u64 *bar) {
    asm volatile(EVICT_FIRST "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)) : "memory");
}

// `cp_async_16` (hardware.cuh) to an address in shared memory.
DEVICE void cp_async_16(u32 to, const u16 *from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// cp.async of 4 bytes, or zeros if `exists` is false.
DEVICE void cp_async_4(void *to, const void *from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

// setmaxnreg: give CONSUMER registers per thread to N consumer warpgroups and PRODUCER to the producer warpgroup. The
// CTA would hang if consumers requested more than producers release.
template <int N, int CONSUMER, int PRODUCER, int CTAS = 1> DEVICE void reallocate_registers(bool consumer) {
    constexpr int SHARE = 65536 / CTAS / (128 * (N + 1)) / 8 * 8;
    static_assert(N * (CONSUMER - SHARE) <= SHARE - PRODUCER, "more registers than there are");
    if (consumer) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER));
}

// wgmma: a warpgroup's products on the tensor core, d (64 x N, N / 2 floats per thread) += a (64 x 16) b (16 x N).
//
// Warp w of the warpgroup has rows [16 w, 16 w + 16); its floats 4 j to 4 j + 3 are those of mma.sync for columns
// [8 j, 8 j + 8). Operands in shared memory are given by their descriptors (hopper_tiles.cuh), operands a in registers
// as operand A of mma.sync for each warp.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most PENDING committed groups are in flight.
template <int PENDING>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Force x, which is never negative, to be computed before the next wait, by a store that never executes. nowhere: any
// shared address.
DEVICE void compute_before_wait(float x, void *nowhere) {
    asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(x), "r"(shared_address(nowhere))
                 : "memory");
}

// The operands d[i] to d[i + N - 1] of an asm statement, and their names.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define D96(i) D64(i), D32(i + 64)
#define D128(i) D64(i), D64(i + 64)
#define TEN(T) "%" #T "0, %" #T "1, %" #T "2, %" #T "3, %" #T "4, %" #T "5, %" #T "6, %" #T "7, %" #T "8, %" #T "9"
#define NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES16 TEN() ", %10, %11, %12, %13, %14, %15"
#define NAMES32 TEN() ", " TEN(1) ", " TEN(2) ", %30, %31"
#define NAMES60 TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5)
#define NAMES64 NAMES60 ", %60, %61, %62, %63"
#define NAMES96 NAMES60 ", " TEN(6) ", " TEN(7) ", " TEN(8) ", %90, %91, %92, %93, %94, %95"
#define NAMES120 NAMES60 ", " TEN(6) ", " TEN(7) ", " TEN(8) ", " TEN(9) ", " TEN(10) ", " TEN(11)
#define NAMES128 NAMES120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." DTYPE "." DTYPE " "
#define SET_P(i) "{\n.reg .pred p;\nsetp.ne.b32 p, %" #i ", 0;\n"

// d += a b^T, or d = a b^T if not `add`, for descriptors a of 64 rows and b of 128, 64, 32 or 16 rows, of 16 columns. A, B,
// P: the numbers of the operands a, b and add.
#define WGMMA_SHARED(NAME, N, FLOATS, A, B, P, MAJORS) \
    DEVICE void NAME(float (&d)[FLOATS], u64 a, u64 b, bool add) { \
        asm volatile(SET_P(P) WGMMA(N) "{" NAMES##FLOATS "}, %" #A ", %" #B ", p, 1, 1, " MAJORS ";\n}" \
                     : D##FLOATS(0) : "l"(a), "l"(b), "r"(static_cast<u32>(add))); \
    }
WGMMA_SHARED(wgmma_shared, 128, 64, 64, 65, 66, "0, 0")
WGMMA_SHARED(wgmma_shared, 64, 32, 32, 33, 34, "0, 0")
WGMMA_SHARED(wgmma_shared, 32, 16, 16, 17, 18, "0, 0")
WGMMA_SHARED(wgmma_shared, 16, 8, 8, 9, 10, "0, 0")
// The same for transposed a and b: descriptors of 16 rows of 64 columns; d += a^T b, or d = a^T b if not `add`.
WGMMA_SHARED(wgmma_shared_transposed, 64, 32, 32, 33, 34, "1, 1")

#define A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// d += a b^T, or d = a b^T if not `add`, for a in registers and descriptor b of 64 rows of 16 columns.
DEVICE void wgmma_registers_bt(float (&d)[32], const u32 (&a)[4], u64 b, bool add) {
    asm volatile(SET_P(37) WGMMA(64) "{" NAMES32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : D32(0) : A_REGISTERS, "l"(b), "r"(static_cast<u32>(add)));
}
// d += a b, for a in registers and descriptor b of 16 rows of N = 64, 128, 192 or 256 columns.
#define WGMMA_REGISTERS(N, FLOATS, A, B) \
    DEVICE void wgmma_registers(float (&d)[FLOATS], const u32 (&a)[4], u64 b) { \
        asm volatile(WGMMA(N) "{" NAMES##FLOATS "}, {" A "}, %" #B ", 1, 1, 1, 1;" : D##FLOATS(0) : A_REGISTERS, "l"(b)); \
    }
WGMMA_REGISTERS(64, 32, "%32, %33, %34, %35", 36)
WGMMA_REGISTERS(128, 64, "%64, %65, %66, %67", 68)
WGMMA_REGISTERS(192, 96, "%96, %97, %98, %99", 100)
WGMMA_REGISTERS(256, 128, "%128, %129, %130, %131", 132)
