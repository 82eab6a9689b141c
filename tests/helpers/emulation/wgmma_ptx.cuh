// The kernels' wgmma_ptx.cuh on a CPU: every warp computes its 16 rows of a product when it gets there, from what shared memory holds then.
#pragma once
#include "tma.cuh"

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
