// The kernels' hopper.cuh on a CPU: mbarriers, TMA loads of keys and of rows, barriers of some warps, and writes to the CTAs of a cluster.
//
// Unless copies happen at once, what TMA loads or another CTA writes arrives only when no thread can go on without it.
#pragma once
#include "warp.cuh"

// As tests pack it (emulate.py): k or v [B,G,S_kv,D], or pages, of numbers of `size` bytes, in boxes of `rows` keys by `columns` columns.
struct alignas(64) TensorMap {
    const char *data;
    i64 sizes[4], strides[4], rows, columns, size;
    char padding[128 - 96];
};
static_assert(sizeof(TensorMap) == 128, "as the driver's");

struct Barrier {
    u16 count;
    short pending;
    int bytes : 31;  // that are still expected
    u32 phase : 1;
};
static_assert(sizeof(Barrier) == 8, "as a mbarrier");

static Barrier &barrier_at(const u64 *bar) { return *reinterpret_cast<Barrier *>(const_cast<u64 *>(bar)); }
static void complete(u64 *bar, int arrivals, int bytes) {
    Barrier &at = barrier_at(bar);
    require(at.count, "a barrier that was never initialized");
    at.pending -= arrivals;
    at.bytes += bytes;
    require(at.pending >= 0, "more arrivals than a barrier expects");
    if (at.pending || at.bytes) return;
    at.pending = at.count;
    at.phase ^= 1;
}
static bool passed(const u64 *bar, int parity) { return static_cast<int>(barrier_at(bar).phase) != parity; }

DEVICE void mbarrier_init(u64 *bar, int count) { barrier_at(bar) = {static_cast<u16>(count), static_cast<short>(count), 0, 0}; }
DEVICE void mbarrier_fence_init() {}
DEVICE void mbarrier_arrive(u64 *bar) { complete(bar, 1, 0); }
DEVICE void mbarrier_arrive_expect(u64 *bar, int bytes) {
    barrier_at(bar).bytes += bytes;
    complete(bar, 1, 0);
}
DEVICE void mbarrier_wait(u64 *bar, int parity) {
    wait_until([](const void *bar, int parity) { return passed(static_cast<const u64 *>(bar), parity); }, bar, parity);
}
DEVICE void mbarrier_wait_cluster(u64 *bar, int parity) { mbarrier_wait(bar, parity); }
DEVICE void fence_async_proxy() {}

// The halves of a barrier of the cluster: each thread waits for as many arrivals as its own would complete.
static unsigned cluster_arrivals;
DEVICE void cluster_arrive() { ++cluster_arrivals; }
DEVICE void cluster_wait() {
    wait_until([](const void *all, int) { return cluster_arrivals % *static_cast<const unsigned *>(all) == 0; }, &cluster_threads, 0);
}

template <class T>
static T *in_cta(T *mine, u32 cta) {
    require(cta < CLUSTER, "no such CTA");
    return reinterpret_cast<T *>(reinterpret_cast<char *>(mine) - reinterpret_cast<char *>(dynamic_memory) + reinterpret_cast<char *>(memories[cta]));
}
DEVICE void store_async(float *mine, u64 *bar, u32 cta, float low, float high) {
    float *to = in_cta(mine, cta);
    u64 *counter = in_cta(bar, cta);
    require(cluster_arrivals % cluster_threads == 0, "a write to a CTA that has not begun");
    later([=] {
        to[0] = low, to[1] = high;
        complete(counter, 0, -8);
    });
}
DEVICE void store_async(float *mine, u64 *bar, u32 cta, float4 x) {
    require(reinterpret_cast<uintptr_t>(mine) % 16 == 0, "four floats are not aligned");
    store_async(mine, bar, cta, x.x, x.y);
    store_async(mine + 2, bar, cta, x.z, x.w);
}

// Barriers of some warps.
static Gate named_gates[CLUSTER][16];
static bool named_any[CLUSTER][16][2];
template <int THREADS>
DEVICE bool named_barrier_any(int number, bool x) {
    const unsigned cta = current / threads;
    Gate &gate = named_gates[cta][number];
    bool *any = named_any[cta][number];
    const u32 turn = gate.opened % 2;
    if (!gate.arrived) any[turn] = false;
    any[turn] |= x;
    wait(gate, THREADS);
    return any[turn];
}
template <int THREADS>
DEVICE void named_barrier(int number) {
    named_barrier_any<THREADS>(number, false);
}

DEVICE void tma_prefetch(const TensorMap *) {}

// A box of keys, swizzled by its 64 or 128 bytes of columns; zeros past the last key, and of a batch entry or page before the first.
DEVICE void tma_load_keys(void *to, const TensorMap *map, u64 *bar, int column, int key, i64 g, i64 b) {
    const i64 bytes = map->columns * map->size, chunks = bytes / 16;
    const uintptr_t address = reinterpret_cast<uintptr_t>(to);
    require(address % (map->rows * bytes < 1024 ? map->rows * bytes : 1024) == 0, "a box is not aligned");
    require(b < map->sizes[0] && g < map->sizes[1] && column + map->columns <= map->sizes[3], "no such box");
    require(bytes == 64 || bytes == 128, "no such swizzle");
    later([=] {
        for (i64 row = 0; row < map->rows; ++row)
            for (i64 i = 0; i < chunks; ++i) {
                const i64 from = b * map->strides[0] + g * map->strides[1] + (key + row) * map->strides[2] + column;
                char *chunk = static_cast<char *>(to) + row * bytes + (i ^ (address + row * bytes) / 128 % chunks) * 16;
                if (b >= 0 && key + row < map->sizes[2]) memcpy(chunk, map->data + from * map->size + i * 16, 16);
                else memset(chunk, 0, 16);
            }
        complete(bar, 0, -static_cast<int>(map->rows * bytes));
    });
}
DEVICE void tma_load_key_group(void *to, const TensorMap *map, u64 *bar, int key, i64 g, i64 b) {
    for (i64 i = 0; 64 * i < map->sizes[3]; ++i) tma_load_keys(static_cast<char *>(to) + 1024 * i, map, bar, 64 * i, key, g, b);
}
DEVICE void tma_load_keys_once(void *to, const TensorMap *map, u64 *bar, int column, int key, i64 g, i64 b) {
    tma_load_keys(to, map, bar, column, key, g, b);
}
DEVICE void bulk_load_once(void *to, const void *from, int bytes, u64 *bar) {
    require((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 == 0, "a bulk load is not aligned");
    later([=] {
        memcpy(to, from, bytes);
        complete(bar, 0, -bytes);
    });
}
DEVICE void cp_async_16(u32 to, const u16 *from, bool exists) {
    cp_async_16(reinterpret_cast<u16 *>(reinterpret_cast<char *>(dynamic_memory) + to), from, exists);
}
DEVICE void cp_async_4(void *to, const void *from, bool exists) {
    if (exists) memcpy(to, from, 4);
    else memset(to, 0, 4);
}
// Once the thread's copies are there, which happens by itself.
DEVICE void cp_async_mbarrier_arrive(u64 *bar) {
    Fiber &self = fibers[current];
    require(self.groups == 1, "an arrival after committed copies is not emulated");
    struct Copies {
        u32 count;
        Copy copy[64];
    } copies;
    copies.count = self.copies[self.first_group];
    require(copies.count <= 64, "more copies than the emulation holds");
    for (u32 i = 0; i < copies.count; ++i) copies.copy[i] = self.copy[self.first_group][i];
    self.copies[self.first_group] = 0;
    later([=] {
        for (u32 i = 0; i < copies.count; ++i) perform(copies.copy[i]);
        complete(bar, 1, 0);
    });
}

// As tests pack a map of q or do [B,S,G,h,D], in boxes of `tokens` tokens of one group with all heads by 64 columns.
struct RowMap {
    const char *data;
    i64 sizes[5], strides[5], tokens;
    char padding[128 - 96];
};
static_assert(sizeof(RowMap) == sizeof(TensorMap), "as the driver's");
// Such a box, rows (token, head) after each other, swizzled; zeros past the last token.
DEVICE void tma_load_rows(void *to, const TensorMap *tensor_map, u64 *bar, int column, i64 g, i64 s, i64 b) {
    const RowMap *map = reinterpret_cast<const RowMap *>(tensor_map);
    const i64 heads = map->sizes[3];
    require(reinterpret_cast<uintptr_t>(to) % 128 == 0, "a box is not aligned");
    require(b >= 0 && b < map->sizes[0] && s >= 0 && g < map->sizes[2] && column + 64 <= map->sizes[4], "no such box");
    later([=] {
        for (i64 row = 0; row < map->tokens * heads; ++row)
            for (i64 i = 0; i < 8; ++i) {
                const i64 token = s + row / heads, place = reinterpret_cast<uintptr_t>(to) / 128 + row;
                char *chunk = static_cast<char *>(to) + row * 128 + (i ^ place % 8) * 16;
                const i64 from = b * map->strides[0] + token * map->strides[1] + g * map->strides[2] + row % heads * map->strides[3] + column;
                if (token < map->sizes[1]) memcpy(chunk, map->data + from * 2 + i * 16, 16);
                else memset(chunk, 0, 16);
            }
        complete(bar, 0, -static_cast<int>(map->tokens * heads * 128));
    });
}

template <int N, int CONSUMER, int PRODUCER, int CTAS = 1>
DEVICE void reallocate_registers(bool) {}

// wgmma: every warp computes its 16 rows of a product when it gets there, from what shared memory holds then.
DEVICE void wgmma_fence() {}
DEVICE void wgmma_commit() {}
// All lanes have read their operands.
template <int PENDING>
DEVICE void wgmma_wait() {
    __syncwarp();
}
DEVICE void compute_before_wait(float, void *) {}

// Number (row, column) of an operand in shared memory; columns are adjacent numbers of a panel's rows, of 128 swizzled bytes. The descriptor
// says how many bytes further the next 64 columns and the next eight rows are.
static float number_at(u64 descriptor, int row, int column) {
    const u32 start = (descriptor & 0x3fff) * 16, leading = (descriptor >> 16 & 0x3fff) * 16, group = (descriptor >> 32 & 0x3fff) * 16;
    u32 address = start + column / 64 * leading + row / 8 * group + row % 8 * 128 + column % 64 * 2;
    address ^= (address >> 7 & 7) << 4;
    return operand(*reinterpret_cast<const u16 *>(reinterpret_cast<const char *>(dynamic_memory) + address));
}

// d += a b for rows r and r + 8 of a warp's a, whose 16 columns are in left[2][16]; right(k, column): number of b.
template <int N, class Right>
static void add_product(float (&d)[N], const float (&left)[2][16], bool add, Right right) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < N; ++i) {
        const int row = i % 4 / 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = add ? d[i] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right(k, column);
        d[i] = sum;
    }
}

// Rows of operand a that a lane computes, from registers.
static void rows_of(float (&left)[2][16], const u32 (&a)[4]) {
    struct Operand {
        u16 numbers[8];
    } mine;
    memcpy(mine.numbers, a, 16);
    const Slot *table = exchange(mine);
    for (int row = 0; row < 2; ++row)
        for (int k = 0; k < 16; ++k)
            left[row][k] = operand(from_lane<Operand>(table, threadIdx.x % 32 / 4 * 4 + k % 8 / 2).numbers[(row + k / 8 * 2) * 2 + k % 2]);
}

template <int N>
DEVICE void wgmma_shared(float (&d)[N], u64 a, u64 b, bool add) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float left[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) left[i][k] = number_at(a, row + 8 * i, k);
    add_product(d, left, add, [=](int k, int column) { return number_at(b, column, k); });
    __syncwarp();
}
DEVICE void wgmma_shared_transposed(float (&d)[32], u64 a, u64 b, bool add) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float left[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k) left[i][k] = number_at(a, k, row + 8 * i);
    add_product(d, left, add, [=](int k, int column) { return number_at(b, k, column); });
    __syncwarp();
}
template <int N>
DEVICE void wgmma_registers(float (&d)[N], const u32 (&a)[4], u64 b) {
    float left[2][16];
    rows_of(left, a);
    add_product(d, left, true, [=](int k, int column) { return number_at(b, k, column); });
}
DEVICE void wgmma_registers_bt(float (&d)[32], const u32 (&a)[4], u64 b, bool add) {
    float left[2][16];
    rows_of(left, a);
    add_product(d, left, add, [=](int k, int column) { return number_at(b, column, k); });
}
