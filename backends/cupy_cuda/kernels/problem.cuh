// The arguments of a call, the ranges of a row clamped to the keys that it sees, and the mathematics.
//
// With logits s = scale * q k^T over the selected keys of a row, L = log sum_j exp(s_j) and p = exp(s - L):
//   forward    o = sum_j p_j v_j
//   backward   delta = sum(do * o) - dL,  ds = p * (do v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do
// Kernels work in base 2, with c = scale * log2 e, because exp2 is one instruction; lse in memory is a natural logarithm.
//
// What a row sees may be arithmetic instead of ranges (BY_ARITHMETIC):
//   COMPRESS_BLOCK, COMPRESS_STRIDE  k and v are compressed: it sees those that lie at or before it
//   WINDOW                           1: it sees the last `window` keys, its own among them
//
// K and V may be the cache of several sequences, each with a length of its own:
//   PAGE  keys of a page: key j of sequence b is key j % PAGE of page block_table[b, j / PAGE]; 0: there are no pages
#pragma once
#if defined(COMPRESS_STRIDE) || defined(WINDOW)
#define BY_ARITHMETIC
#endif
#ifdef PAGE
constexpr bool CACHED = true;
#else
constexpr bool CACHED = false;
#define PAGE 0
#endif
#include "warp.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

DEVICE float infinity() { return __int_as_float(0x7f800000); }

// The shortest integers with a bit for each of N rows of a tile; sm90.py allocates such.
template <int BYTES>
struct UnsignedOf {
    typedef u64 Type;
};
template <>
struct UnsignedOf<1> {
    typedef unsigned char Type;
};
template <>
struct UnsignedOf<2> {
    typedef u16 Type;
};
template <>
struct UnsignedOf<4> {
    typedef u32 Type;
};
template <int N>
using RowBits = typename UnsignedOf<(N <= 8 ? 1 : N <= 16 ? 2 : N <= 32 ? 4 : 8)>::Type;

// q or do [B,S,G,h,D], of any strides.
struct HeadsTensor {
    const u16 *data;
    i64 stride_b, stride_s, stride_g, stride_h;
    DEVICE const u16 *group(i64 b, i64 g) const { return data + b * stride_b + g * stride_g; }  // of row 0
    DEVICE const u16 *heads(i64 b, i64 s, i64 g) const { return data + b * stride_b + s * stride_s + g * stride_g; }
};

// k or v [B,G,S_kv,D], or pages [pages,G,PAGE,D], of any strides.
struct KeysTensor {
    const u16 *data;
    i64 stride_b, stride_g, stride_n;
    DEVICE const u16 *keys(i64 b, i64 g) const { return data + b * stride_b + g * stride_g; }
};

// The call, as every kernel receives it. All fields have 8 bytes, so that nothing is padded (launch.py).
struct Problem {
    HeadsTensor q;       // [B,S,G,h,DK]
    KeysTensor k, v;     // [B,G,S_kv,DK], [B,G,S_kv,DV]
    const char *q_pos;   // [B,S], or null: positions are S_kv - S + s; CACHED: lengths [B], positions are lengths[b] - S + s
    i64 stride_pb, stride_ps;
    const char *ranges;  // [B,S,G,n,2], contiguous
    union {
        i64 pos_bytes;  // of one integer: 4 or 8
        i64 start;      // of compressed keys: the position of row 0
    };
    i64 range_bytes;
    i64 S, S_kv, G, h;
    union {
        i64 n;       // ranges of a row
        i64 window;  // keys that a row sees, at most S_kv
    };
    const int *block_table;  // [B, pages of a sequence]; entries past a sequence's keys hold anything
    i64 stride_table;
    double scale, scale_log2;
};

// Where number i of an array of 4- or 8-byte integers is.
DEVICE const int *integer_at(const char *array, i64 bytes, i64 i) { return reinterpret_cast<const int *>(array + i * bytes); }

// Such an integer as it was loaded. Making a number of it waits for the load, and so would every load after that.
struct Integer {
    int low = 0, high = 0;
    DEVICE Integer() {}
    DEVICE Integer(const int *at, i64 bytes) : low(at[0]), high(bytes == 8 ? at[1] : 0) {}
    DEVICE i64 value(i64 bytes) const { return bytes == 8 ? static_cast<i64>(static_cast<u64>(high) << 32 | static_cast<u32>(low)) : low; }
};

// Where the position of row s is, or (CACHED) the length of its sequence; null: positions are arithmetic.
DEVICE const int *position_at(const Problem &p, i64 b, i64 s) {
    if (CACHED) return integer_at(p.q_pos, p.pos_bytes, b * p.stride_pb);
    return p.q_pos ? integer_at(p.q_pos, p.pos_bytes, b * p.stride_pb + s * p.stride_ps) : nullptr;
}

// One past the last key that row s may see: min(t + 1, S_kv), or how many compressed keys lie at or before t, where k and v are compressed.
// position: as of `position_at`.
DEVICE int row_limit(const Problem &p, i64 s, const int *position) {
#ifdef COMPRESS_STRIDE
    const i64 past = p.start + s + 1 - COMPRESS_BLOCK;  // keys after compressed key 0 that may be seen
    return past < 0 ? 0 : static_cast<int>(min(past / COMPRESS_STRIDE + 1, p.S_kv));
#elif defined(WINDOW)
    return static_cast<int>(p.S_kv - p.S) + static_cast<int>(s) + 1;  // in 32 bits: computed again sooner than kept in registers
#endif
    const i64 last = p.S_kv - p.S + s, at = position ? Integer(position, p.pos_bytes).value(p.pos_bytes) : last;
    return static_cast<int>(max(0ll, min(CACHED ? at - p.S + s : at, p.S_kv - 1) + 1));
}
DEVICE int row_limit(const Problem &p, i64 b, i64 s) { return row_limit(p, s, position_at(p, b, s)); }

// Whether a row does not see a key, given its `row_limit`. Both may be counted from another key than the first.
DEVICE bool hidden(const Problem &p, int key, int limit) {
#ifdef WINDOW
    return static_cast<u32>(limit - 1 - key) >= static_cast<u32>(p.window);  // the distance from the row's own key
#else
    return key >= limit;
#endif
}

// BY_ARITHMETIC: the first row that sees a key; S or more if none does.
DEVICE i64 first_row(const Problem &p, i64 key) {
#ifdef COMPRESS_STRIDE
    return max(0ll, key * COMPRESS_STRIDE + COMPRESS_BLOCK - 1 - p.start);
#else
    return max(0ll, key - (p.S_kv - p.S));
#endif
}

// Where key `key` of sequence b lies: at key `in_page` of page `page_of`, in place of which there is a batch entry where there are no pages.
// The entry of the block table is read: of keys that exist alone.
DEVICE int page_of(const Problem &p, int b, int key) {
#if PAGE
    return p.block_table[b * p.stride_table + key / PAGE];
#else
    return b;
#endif
}
DEVICE int in_page(int key) {
#if PAGE
    return key % PAGE;
#else
    return key;
#endif
}

// A range as [max(begin, 0), min(stop, limit)), end >= start; clamped before the cast: int64 may hold any bound.
template <class Bound>
DEVICE void clamp_bounds(Bound begin, Bound stop, int limit, int &start, int &end) {
    start = static_cast<int>(min(max(begin, Bound{0}), static_cast<Bound>(limit)));
    end = max(start, static_cast<int>(max(min(stop, static_cast<Bound>(limit)), Bound{0})));
}

// A range as it was loaded.
struct Range {
    Integer begin, stop;
    DEVICE Range() {}
    DEVICE Range(const Problem &p, const int *at) : begin(at, p.range_bytes), stop(at + p.range_bytes / 4, p.range_bytes) {}

    DEVICE void clamp(const Problem &p, int limit, int &start, int &end) const {
        clamp_bounds(begin.value(p.range_bytes), stop.value(p.range_bytes), limit, start, end);
    }
};
// Where range number i of all ranges is.
DEVICE const int *range_at(const Problem &p, i64 i) { return integer_at(p.ranges, p.range_bytes, 2 * i); }
DEVICE void clamped_range(const Problem &p, i64 i, int limit, int &start, int &end) {
    Range(p, range_at(p, i)).clamp(p, limit, start, end);
}

// A query row: position s of batch entry b and group g, and its index among B*S*G.
struct Row {
    i64 b, s, g, index;
};

// Row number `pid` in the order [B,G,S]: adjacent CTAs share a group, and often keys.
DEVICE Row row_of(const Problem &p, u32 pid) {  // 32 bits: a grid has fewer than 2^31 CTAs, and 64-bit divisions are slow
    u32 S = p.S, G = p.G;
    Row row;
    row.s = pid % S;
    row.b = pid / S / G;
    row.g = pid / S % G;
    row.index = (row.b * p.S + row.s) * p.G + row.g;
    return row;
}
