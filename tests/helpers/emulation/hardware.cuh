// The kernels' hardware.cuh on a CPU. The threads of a CTA, or of a cluster, are fibers of one thread, which run until they wait for each
// other. The CTAs of a cluster have dynamic shared memory of their own, but share `__shared__` variables.
//
// Which fiber runs first, whether a copy happens at once or only when it is waited for, and whether a warp's first lane runs ahead of its
// others, are chosen per run: a missing barrier or wait changes the result, or the threads wait for ever. Copies and ldmatrix check alignment; shared memory is full of NaN when a CTA begins.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE inline
#define UNROLL
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define CLUSTERED
#define __grid_constant__
#define __align__(n) alignas(n)

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, gridDim;
static u16 *dynamic_memory;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(8) uint2 {
    u32 x, y;
};
DEVICE int2 make_int2(int x, int y) { return {x, y}; }
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <class T>
DEVICE T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
DEVICE T max(T a, T b) {
    return a < b ? b : a;
}
DEVICE float __int_as_float(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

DEVICE int __float_as_int(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
DEVICE u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = static_cast<u64>(high) << 32 | low;
    u32 chosen = 0;
    for (unsigned i = 0; i < 4; ++i) chosen |= static_cast<u32>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return chosen;
}

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "emulation: %s, block %u thread %u\n", what, blockIdx.x, threadIdx.x);
    abort();
}

// Fibers and barriers.

struct Gate {
    unsigned arrived = 0;
    u32 opened = 0;  // times
};

struct Copy {
    u16 *to;
    const u16 *from;  // null: zeros
};

constexpr unsigned MOST_THREADS = CLUSTER == 1 ? 1024 : 512 * CLUSTER, MOST_GROUPS = 8, MOST_COPIES = 256;

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    bool begun;
    u32 exchanges;
    u32 first_group, groups;  // of copies under way; the last is not committed
    u32 copies[MOST_GROUPS];
    Copy copy[MOST_GROUPS][MOST_COPIES];
    char stack[64 << 10];
};

struct Wait {  // of a fiber, apart from it: most of the time the scheduler looks for one that is ready
    Gate *gate;  // until it opens once more than `opened`
    bool (*until)(const void *, int);  // until it holds of these
    const void *what;
    int number;
    u32 opened;
    bool done;
    bool ready() const { return !done && (!gate || gate->opened != opened) && (!until || until(what, number)); }
};

struct alignas(8) Slot {
    char bytes[64];
};

static Fiber fibers[MOST_THREADS];
static Wait waits[MOST_THREADS];
static Gate warp_gates[MOST_THREADS / 32], block_gates[CLUSTER], cluster_gate;
static Slot slots[MOST_THREADS / 32][2][32];
static jmp_buf scheduler;
static unsigned threads;  // of a block
static unsigned current;  // the fiber that runs: threads of a cluster's blocks, one block after another
static unsigned cluster_threads;
static u16 *memories[CLUSTER];
static bool backwards, eager;
static int late_warp;  // whose lanes, but the first, run when nothing else goes on; -1: none
struct Arrival {  // a copy that no thread performs
    Arrival *next;
    void (*happen)(Arrival *);
};
static Arrival *arrivals, **last_arrival = &arrivals;  // in order; no std::deque or std::function, whose headers take half a second each
static void (*body)();

static void wait(Gate &gate, unsigned expected) {
    unsigned thread = current;
    if (++gate.arrived == expected) {
        gate.arrived = 0;
        ++gate.opened;
        return;
    }
    waits[thread].gate = &gate;
    waits[thread].opened = gate.opened;
    if (!_setjmp(fibers[thread].here)) _longjmp(scheduler, 1);
    waits[thread].gate = nullptr;
}

// Wait until `holds(what, number)`.
static void wait_until(bool (*holds)(const void *, int), const void *what, int number) {
    if (holds(what, number)) return;
    unsigned thread = current;
    Wait &self = waits[thread];
    self.until = holds, self.what = what, self.number = number;
    if (!_setjmp(fibers[thread].here)) _longjmp(scheduler, 1);
    waits[thread].until = nullptr;
}

// What happens by itself: at once, or when no thread can go on without it.
template <class Work>
static void later(Work work) {
    struct Kept : Arrival {
        Work work;
    };
    if (eager) return work();
    Kept *kept = static_cast<Kept *>(aligned_alloc(64, (sizeof(Kept) + 63) / 64 * 64));
    memcpy(static_cast<void *>(&kept->work), &work, sizeof(work));
    kept->next = nullptr;
    kept->happen = [](Arrival *it) { static_cast<Kept *>(it)->work(); };
    *last_arrival = kept;
    last_arrival = &(*last_arrival)->next;
}

static void first_arrives() {
    Arrival *first = arrivals;
    arrivals = first->next;
    if (!arrivals) last_arrival = &arrivals;
    first->happen(first);
    free(first);
}

static void enter() {
    body();
    Fiber &self = fibers[current];
    for (u32 i = 0; i < self.groups; ++i) require(!self.copies[(self.first_group + i) % MOST_GROUPS], "copies that nobody waited for");
    waits[current].done = true;
    _longjmp(scheduler, 1);
}

static bool is_late(unsigned thread) { return static_cast<int>(thread / 32) == late_warp && thread % 32; }

static void run_cluster(unsigned first_block) {
    const unsigned all = threads * CLUSTER;
    for (unsigned i = 0; i < all; ++i) {
        Fiber &fiber = fibers[i];
        waits[i] = {};
        fiber.begun = false;
        fiber.exchanges = fiber.first_group = fiber.copies[0] = 0;
        fiber.groups = 1;
    }
    for (;;) {
        _setjmp(scheduler);
        int next = -1, late = -1;
        for (unsigned i = 0; i < all && next < 0; ++i) {
            unsigned thread = backwards ? all - 1 - i : i;
            if (waits[thread].ready()) (is_late(thread) ? late : next) = static_cast<int>(thread);
        }
        if (next < 0 && arrivals) {
            first_arrives();
            continue;
        }
        if (next < 0) next = late;
        if (next < 0) break;
        current = static_cast<unsigned>(next);
        threadIdx.x = current % threads;
        blockIdx.x = first_block + current / threads;
        dynamic_memory = memories[current / threads];
        Fiber &fiber = fibers[next];
        if (fiber.begun) _longjmp(fiber.here, 1);
        fiber.begun = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack;
        fiber.start.uc_stack.ss_size = sizeof(fiber.stack);
        makecontext(&fiber.start, enter, 0);
        setcontext(&fiber.start);
    }
    for (unsigned i = 0; i < all; ++i) require(waits[i].done, "threads wait for each other for ever");
}

// What the 32 lanes of a warp tell each other; valid until the lane's next exchange.
template <class T>
static const Slot *exchange(const T &mine) {
    static_assert(sizeof(T) <= sizeof(Slot), "too much for a slot");
    unsigned warp = current / 32, lane = current % 32;
    Slot *table = slots[warp][fibers[current].exchanges++ % 2];
    memcpy(&table[lane], &mine, sizeof(T));
    wait(warp_gates[warp], 32);
    return table;
}

template <class T>
static T from_lane(const Slot *table, unsigned lane) {
    T value;
    memcpy(&value, &table[lane], sizeof(T));
    return value;
}

DEVICE void __syncthreads() { wait(block_gates[current / threads], threads); }
DEVICE void __syncwarp() { wait(warp_gates[current / 32], 32); }
DEVICE void __threadfence() {}  // CTAs run one after another
DEVICE void wait_for_stream() {}  // launches run one after another
DEVICE void wait_for_kernel_ahead() {}
DEVICE void start_next_kernel() {}
DEVICE void cluster_sync() { wait(cluster_gate, threads * CLUSTER); }
DEVICE float load_from_cta(const float *mine, u32 number) {
    size_t bytes = reinterpret_cast<const char *>(mine) - reinterpret_cast<const char *>(dynamic_memory);
    return *reinterpret_cast<const float *>(reinterpret_cast<const char *>(memories[number]) + bytes);
}
template <class T>
DEVICE T __shfl_sync(u32, T x, int lane) {
    return from_lane<T>(exchange(x), static_cast<unsigned>(lane) % 32);
}
template <class T>
DEVICE T __shfl_up_sync(u32, T x, int by) {
    int lane = threadIdx.x % 32;
    return from_lane<T>(exchange(x), static_cast<unsigned>(lane < by ? lane : lane - by));
}
template <class T>
DEVICE T __shfl_xor_sync(u32, T x, int mask) {
    unsigned lane = threadIdx.x % 32;
    return from_lane<T>(exchange(x), lane ^ static_cast<unsigned>(mask));
}
DEVICE u32 __ballot_sync(u32, bool x) {
    const Slot *table = exchange(x);
    u32 votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) votes |= (from_lane<bool>(table, lane) ? 1u : 0u) << lane;
    return votes;
}
DEVICE bool __any_sync(u32, bool x) {
    const Slot *table = exchange(x);
    bool any = false;
    for (unsigned lane = 0; lane < 32; ++lane) any |= from_lane<bool>(table, lane);
    return any;
}
template <class T, class Join>
static T joined(T x, Join join) {
    const Slot *table = exchange(x);
    T all = from_lane<T>(table, 0);
    for (unsigned lane = 1; lane < 32; ++lane) all = join(all, from_lane<T>(table, lane));
    return all;
}
DEVICE int __reduce_min_sync(u32, int x) {
    return joined(x, [](int a, int b) { return a < b ? a : b; });
}
DEVICE int __reduce_max_sync(u32, int x) {
    return joined(x, [](int a, int b) { return a > b ? a : b; });
}
DEVICE int __reduce_add_sync(u32, int x) {
    return joined(x, [](int a, int b) { return a + b; });
}
DEVICE u32 __reduce_or_sync(u32, u32 x) {
    return joined(x, [](u32 a, u32 b) { return a | b; });
}
DEVICE u32 __match_any_sync(u32, int x) {
    const Slot *table = exchange(x);
    u32 equal = 0;
    for (unsigned lane = 0; lane < 32; ++lane) equal |= (from_lane<int>(table, lane) == x ? 1u : 0u) << lane;
    return equal;
}
DEVICE int __popc(u32 x) { return __builtin_popcount(x); }
DEVICE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
DEVICE int __ffsll(unsigned long long x) { return __builtin_ffsll(static_cast<long long>(x)); }
DEVICE int __ffs(u32 x) { return __builtin_ffs(static_cast<int>(x)); }
template <class T>
DEVICE T atomicAdd(T *at, T x) {
    T old = *at;
    *at += x;
    return old;
}
DEVICE u32 atomicAdd(u32 *at, u32 x) {
    u32 old = *at;
    *at += x;
    return old;
}
DEVICE u32 atomicInc(u32 *at, u32 last) {
    const u32 old = *at;
    *at = old >= last ? 0 : old + 1;
    return old;
}
template <class T>
DEVICE T atomicOr(T *at, T bits) {
    T old = *at;
    *at |= bits;
    return old;
}

// Numbers.

static float half_to_float(u16 x) {
    _Float16 half;
    memcpy(&half, &x, 2);
    return static_cast<float>(half);
}
static u32 half_bits(float x) {
    _Float16 half = static_cast<_Float16>(x);
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
}

DEVICE float to_float(u16 x) {
#if BF16
    return __int_as_float(static_cast<int>(static_cast<u32>(x) << 16));
#else
    return half_to_float(x);
#endif
}

DEVICE u32 rounded(float x) {
#if BF16
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
    return half_bits(x);
#endif
}

DEVICE u32 pack(float low, float high) { return rounded(low) | rounded(high) << 16; }

// Of the tensor core's operands.
#if E4M3
static float operand(u16 x) { return half_to_float(x); }
DEVICE u32 pack_operand(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
#else
static float operand(u16 x) { return to_float(x); }
DEVICE u32 pack_operand(float low, float high) { return pack(low, high); }
#endif
static u32 half_of_e4m3(u32 byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return (byte & 127) == 127 ? 0x7fff : half_bits(byte & 128 ? -size : size);
}
DEVICE void unpack_e4m3(u32 bytes, u32 &first, u32 &second) {
    first = half_of_e4m3(bytes & 255) | half_of_e4m3(bytes >> 8 & 255) << 16;
    second = half_of_e4m3(bytes >> 16 & 255) | half_of_e4m3(bytes >> 24) << 16;
}

DEVICE float exp2_fast(float x) { return exp2f(x); }

// Copies.

DEVICE u32 shared_address(const void *pointer) {
    return static_cast<u32>(static_cast<const char *>(pointer) - reinterpret_cast<const char *>(dynamic_memory));
}

DEVICE void prefetch_l1(const void *) {}

DEVICE void store_once(void *to, uint4 x) {
    require(reinterpret_cast<uintptr_t>(to) % 16 == 0, "global memory is not aligned");
    memcpy(to, &x, 16);
}

DEVICE void perform(const Copy &copy) {
    if (copy.from)
        memcpy(copy.to, copy.from, 16);
    else
        memset(copy.to, 0, 16);
}

DEVICE void cp_async_16(u16 *to, const u16 *from, bool exists) {
    require(reinterpret_cast<uintptr_t>(to) % 16 == 0, "shared memory is not aligned");
    Copy copy{to, exists ? from : nullptr};
#if ALIGNED
    require(reinterpret_cast<uintptr_t>(from) % 16 == 0, "global memory is not aligned");
    if (!eager) {
        Fiber &self = fibers[current];
        u32 group = (self.first_group + self.groups - 1) % MOST_GROUPS;
        require(self.copies[group] < MOST_COPIES, "more copies than the emulation holds");
        self.copy[group][self.copies[group]++] = copy;
        return;
    }
#endif
    perform(copy);
}

DEVICE void cp_async_commit() {
    Fiber &self = fibers[current];
    require(self.groups < MOST_GROUPS, "more groups of copies than the emulation holds");
    self.copies[(self.first_group + self.groups++) % MOST_GROUPS] = 0;
}

template <int PENDING>
DEVICE void cp_async_wait() {
    Fiber &self = fibers[current];
    for (; self.groups > PENDING + 1; --self.groups) {
        for (u32 i = 0; i < self.copies[self.first_group]; ++i) perform(self.copy[self.first_group][i]);
        self.first_group = (self.first_group + 1) % MOST_GROUPS;
    }
}

// Tensor core.

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct Operands {
        u16 a[8], b[4];
    } mine;
    memcpy(mine.a, a, 16);
    memcpy(mine.b, &b0, 4);
    memcpy(mine.b + 2, &b1, 4);
    const Slot *table = exchange(mine);
    unsigned lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    for (unsigned i = 0; i < 4; ++i) {
        float sum = d[i];
        for (unsigned k = 0; k < 16; ++k) {  // a: registers by rows, then by columns; b: the pair (k, column) is with lane column * 4 + k / 2
            Operands left = from_lane<Operands>(table, row * 4 + k % 8 / 2);
            Operands right = from_lane<Operands>(table, (column + i % 2) * 4 + k % 8 / 2);
            sum += operand(left.a[(i / 2 + k / 8 * 2) * 2 + k % 2]) * operand(right.b[k / 8 * 2 + k % 2]);
        }
        d[i] = sum;
    }
}

DEVICE const Slot *row_pointers(const u16 *row) {
    require(reinterpret_cast<uintptr_t>(row) % 16 == 0, "a matrix row is not aligned");
    return exchange(row);
}

DEVICE void ldmatrix(u32 (&x)[4], const u16 *row) {
    const Slot *table = row_pointers(row);
    unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; ++i) memcpy(&x[i], from_lane<const u16 *>(table, 8 * i + lane / 4) + lane % 4 * 2, 4);
}

DEVICE void ldmatrix_trans(u32 (&x)[4], const u16 *row) {
    const Slot *table = row_pointers(row);
    unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; ++i) {
        u32 low = from_lane<const u16 *>(table, 8 * i + lane % 4 * 2)[lane / 4];
        u32 high = from_lane<const u16 *>(table, 8 * i + lane % 4 * 2 + 1)[lane / 4];
        x[i] = low | high << 16;
    }
}

// Run every cluster of a launch, one after another.
static void launch(unsigned blocks, unsigned block_threads, unsigned shared, int mode, void (*kernel)()) {
    gridDim.x = blocks, threads = block_threads, cluster_threads = threads * CLUSTER, backwards = mode & 1, eager = mode & 2, body = kernel;
    late_warp = (mode >> 2) - 1;
    require(threads * CLUSTER <= MOST_THREADS && blocks % CLUSTER == 0, "more threads than the emulation holds, or part of a cluster");
    for (u16 *&memory : memories) memory = static_cast<u16 *>(aligned_alloc(1024, (shared + 1023) / 1024 * 1024 + 1024));
    for (unsigned first = 0; first < blocks; first += CLUSTER) {
        for (u16 *memory : memories) memset(memory, 0xff, shared);
        run_cluster(first);
    }
    for (u16 *memory : memories) free(memory);
}
