// The machine's own instructions as functions: conversions, asynchronous copies, the matrix unit. A test puts
// another file in this one's place, which does the same on a CPU (tests/emulation/).
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// 16-bit numbers, in pairs: the lower half comes first in memory.

#if BF16
#define NUMBER "bf16"
#else
#define NUMBER "f16"
#endif

DEVICE u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn." NUMBER "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
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

// Copies from global to shared memory. Where `exists` is false nothing is read and zeros are written.

DEVICE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

DEVICE void copy_eight(u16 *to, const u16 *from, bool exists) {
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

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `PENDING` of this thread's groups of copies are under way.
template <int PENDING>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Blocks of a cluster (sm_90 and newer), each of which may read what the others have in shared memory.

// All threads of the cluster have come here, and what they wrote to shared memory is there for all.
DEVICE void cluster_barrier() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A number of the cluster's block `number`, which stands in its shared memory where `mine` does in this block's.
DEVICE float of_block(const float *mine, u32 number) {
    float x;
    asm volatile("{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %1, %2;\nld.shared::cluster.f32 %0, [at];\n}"
                 : "=f"(x)
                 : "r"(shared_address(mine)), "r"(number)
                 : "memory");
    return x;
}

// The matrix unit. A warp holds a 16 x 16 operand A in four registers of two numbers, a 16 x 8 operand B in two, the 16 x 8 result in
// four floats. With r = lane / 4 and c = lane % 4 * 2:
//   A  a0: (r, c) a1: (r + 8, c) a2: (r, c + 8) a3: (r + 8, c + 8), each with the number to its right
//   B  b0: (c, r) b1: (c + 8, r), each with the number below it
//   D  d0, d1: (r, c), (r, c + 1)  d2, d3: (r + 8, c), (r + 8, c + 1)
// So two neighbouring results, rounded and packed, are the operand A of the next product.

DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NUMBER "." NUMBER ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of shared memory; lane l names row l % 8 of matrix l / 8. Each lane receives the pair (r, c) of every matrix.
DEVICE void load_matrices(u32 (&x)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed.
DEVICE void load_transposed(u32 (&x)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}
