// PTX instructions of sm_80 and newer as functions: conversions, cp.async, clusters, mma.sync and ldmatrix.
// Tests replace this file by one that does the same on a CPU (tests/helpers/emulation/hardware.cuh).
//
// Every kernel is compiled with these constants; no header of the toolkit is used:
//   BF16     1: bfloat16, 0: float16
//   DK, DV   columns of a key and of a value, multiples of 8
//   ALIGNED  1: rows of q, k, v (and do) begin at multiples of 16 bytes and are copied by cp.async; 0: by element
//   E4M3     1: keys and values are e4m3, and products are of float16 (stored_tiles.cuh)
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")  // before a loop: unroll it completely, so that arrays that it indexes stay in registers

// An attribute of kernels whose CTAs form clusters of CLUSTER (sm_90 and newer).
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

#if BF16
#define DTYPE "bf16"
#else
#define DTYPE "f16"
#endif
#if E4M3
#define OPERAND "f16"
#else
#define OPERAND DTYPE
#endif

// Two floats as a pair of 16-bit numbers, `low` first in memory. pack_operand: in the type of mma's operands.
#define PACK(NAME, TYPE) \
    DEVICE u32 NAME(float low, float high) { \
        u32 pair; \
        asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low)); \
        return pair; \
    }
PACK(pack, DTYPE)
PACK(pack_operand, OPERAND)

// Convert four e4m3 numbers, in the order of memory, to two pairs of float16, exactly (sm_89 and newer).
DEVICE void unpack_e4m3(u32 bytes, u32 &first, u32 &second) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(first), "=r"(second)
        : "r"(bytes));
}

DEVICE float to_float(u16 x) {
#if BF16
    return __uint_as_float(static_cast<u32>(x) << 16);
#else
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    return wide;
#endif
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Copy 16 bytes from global to shared memory. If not `exists`, nothing is read and zeros are written.
DEVICE void cp_async_16(u16 *to, const u16 *from, bool exists) {
#if ALIGNED
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
#else
    u32 pairs[4] = {0, 0, 0, 0};
    if (exists)
        for (int i = 0; i < 4; ++i) pairs[i] = from[2 * i] | static_cast<u32>(from[2 * i + 1]) << 16;
    *reinterpret_cast<uint4 *>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}

// Load the line of an address to the L1 cache.
DEVICE void prefetch_l1(const void *from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// Store 16 bytes that are read once, and not soon: they leave the caches first.
DEVICE void store_once(void *to, uint4 x) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's committed groups are in flight.
template <int PENDING>
DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Wait for the end of the previous kernel of the stream, before which this one may have started (`launch.start`,
// early). Nothing that a kernel may have written is read before this call, and nothing is written.
DEVICE void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel of the stream start in the same way, once all CTAs have called it or ended.
DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_stream() {
    start_next_kernel();
    wait_for_kernel_ahead();
}

// Barrier of all threads of a cluster (sm_90), after which earlier writes to shared memory are visible to all CTAs.
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The float at the address of `mine`, but in the shared memory of CTA number `cta` of the cluster.
DEVICE float load_from_cta(const float *mine, u32 cta) {
    float x;
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %1, %2;\nld.shared::cluster.f32 %0, [at];\n}"
                 : "=f"(x)
                 : "r"(shared_address(mine)), "r"(cta)
                 : "memory");
    return x;
}

// Tensor core, one warp: d (16 x 8) += a (16 x 16) b (16 x 8). With r = lane / 4 and c = lane % 4 * 2 a lane holds
//   A  a0: (r, c) a1: (r + 8, c) a2: (r, c + 8) a3: (r + 8, c + 8), each with the number to its right
//   B  b0: (c, r) b1: (c + 8, r), each with the number below it
//   D  d0, d1: (r, c), (r, c + 1)  d2, d3: (r + 8, c), (r + 8, c + 1)
// Two adjacent results, packed to 16 bits, are therefore the operand A of the next product.
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." OPERAND "." OPERAND ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices from shared memory: lane l passes the address of row l % 8 of matrix l / 8, and receives the pair
// (r, c) of each. ldmatrix_trans: each matrix transposed.
#define LDMATRIX(NAME, TRANS) \
    DEVICE void NAME(u32 (&x)[4], const u16 *row) { \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" TRANS ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory"); \
    }
LDMATRIX(ldmatrix, "")
LDMATRIX(ldmatrix_trans, ".trans")
