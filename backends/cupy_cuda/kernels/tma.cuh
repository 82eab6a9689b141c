// What Hopper's kernels are made of beside wgmma: barriers in shared memory, bulk tensor copies, and registers that warps hand over.
#pragma once
#include "wgmma.cuh"

struct alignas(64) TensorMap {
    char bytes[128];
};

// A barrier in shared memory: waited for by the parity of its phase, which ends when `count` arrivals and all announced bytes are there.
DEVICE void barrier_init(u64 *bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count)); }
DEVICE void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(u64 *bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory"); }
DEVICE void arrive_expecting(u64 *bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
DEVICE void wait(u64 *bar, int parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(bar)), "r"(parity)
            : "memory");
    } while (!done);
}
// What this thread wrote to shared memory is there for the matrix unit and for bulk copies, once a barrier says that it was written.
DEVICE void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The `THREADS` threads (whole warps) that call this with one `number` from 1 on wait for each other, and see each other's writes.
template <int THREADS>
DEVICE void barrier(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// The same, and whether `x` holds for one of them.
template <int THREADS>
DEVICE bool barrier_any(int number, bool x) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any)
                 : "r"(static_cast<u32>(x)), "r"(number), "n"(THREADS)
                 : "memory");
    return any;
}

// A map is fetched when the first copy asks for it, unless it has been by then.
DEVICE void prefetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Box (column, key) of k or v [B,G,S_kv,D]; what lies outside reads as zeros.
DEVICE void copy_keys_box(void *to, const TensorMap *map, u64 *bar, int column, int key, int g, int b) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(column), "r"(key), "r"(g), "r"(b)
        : "memory");
}
// The same of what is read once: it leaves the L2 cache before all else.
DEVICE void copy_keys_box_once(void *to, const TensorMap *map, u64 *bar, int column, int key, int g, int b) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], policy;"
        "\n}" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(column), "r"(key), "r"(g), "r"(b)
        : "memory");
}
// All heads of some rows from s on, of q or do [B,S,G,h,D].
DEVICE void copy_rows_box(void *to, const TensorMap *map, u64 *bar, int column, int g, int s, int b) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(bar)), "r"(column), "r"(0), "r"(g), "r"(s), "r"(b)
        : "memory");
}

// Four bytes; zeros where nothing `exists`.
DEVICE void copy_four(void *to, const void *from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0) : "memory");
}
// An arrival once all copies that this thread has begun are there.
DEVICE void arrive_when_copied(u64 *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

constexpr int PANEL = 64 * 128;  // bytes of 64 rows of 64 columns
// A tile stands in shared memory in panels of 64 columns, rows of 128 bytes, their 16-byte pieces swapped about in every eight rows (1024
// bytes). Where rows are the rows of the operand, the next eight follow after 1024 bytes. Where columns are (64 of them, and a panel
// further the next 64), so do the next eight of what is summed over.
// The matrix unit takes such an operand by a descriptor. All have one upper half. The lower counts in 16 bytes, so that steps within a
// tile are added to it; where it is the same for all lanes and made outside of a loop, that is all that is left to do in the loop.
DEVICE u32 operand(u32 address) { return (address & 0x3ffff) >> 4; }
constexpr u32 ACROSS = PANEL / 16 << 16;  // is added where columns are the rows of the operand
DEVICE u64 descriptor(u32 lower) { return lower | static_cast<u64>(1024 >> 4 | 1 << 30) << 32; }
// Where piece c (16 bytes) of a row stands in its panel.
DEVICE u32 swizzled(int row, int c) { return row * 128 + (c ^ row % 8) * 16; }

// MORE registers a thread for N groups of warps that compute, LESS for the one that copies. A block, of BLOCKS a multiprocessor, begins with
// an equal share for all; it would wait for ever if the groups took more than the one gives.
template <int N, int MORE, int LESS, int BLOCKS = 1>
DEVICE void share_registers(bool computes) {
    constexpr int SHARE = 65536 / BLOCKS / (128 * (N + 1)) / 8 * 8;
    static_assert(N * (MORE - SHARE) <= SHARE - LESS, "more registers than there are");
    if (computes)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LESS));
}

// What all lanes agree on, so that the compiler knows it.
DEVICE u32 uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// Have a number, which is never negative, computed before what is waited for next: as far as the compiler knows it may be stored here.
DEVICE void before_waiting(float x, void *nowhere) {
    asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(x), "r"(shared_address(nowhere))
                 : "memory");
}

// Steps go round N stages: which one, and the parity of its barriers.
template <int N>
struct Ring {
    int stage = 0, parity = 0;
    DEVICE void next() {
        if (++stage == N) {
            stage = 0;
            parity ^= 1;
        }
    }
};
