// The arguments of a call, a row's limit and its clamped ranges, and the formulas of all kernels.
//
// With logits s = scale * q k^T over the selected keys of a row, L = log sum_j exp(s_j) and p = exp(s - L):
//   forward    o = sum_j p_j v_j
//   backward   delta = sum(do * o) - dL,  ds = p * (do v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q,
//              dv = p^T do
// Kernels compute in base 2 with c = scale * log2 e, because exp2 is one instruction; lse in memory is natural.
//
// The keys that a row sees are its ranges, clamped to its limit, or (BY_ARITHMETIC) follow from its position:
//   COMPRESS_BLOCK, COMPRESS_STRIDE  if > 0, k and v are compressed keys: a row sees those whose block ends at or
//                                    before its position
//   WINDOW                           1: a row sees the last `window` keys, including its own
//   PAGE                             keys per page of a cache of several sequences, each with its own length: key j of
//                                    sequence b is key j % PAGE of page block_table[b, j / PAGE]; 0: no pages;
//                                    -1: no cache
//   PACKED                           1: a sequence is one row of a packed batch, and `q_pos` holds its keys, the request
//                                    whose row of the block table it has, and two other numbers (_triton/packed_rows.py),
//                                    [B+1,4] int32
//   JOINED                           1: pages of one sequence, whose rows stand at `q_pos` [1,S]; 2: they lie in order, of
//                                    e4m3 caches as 16-bit numbers, with a factor of keys and values for each page
//   SHARED_BY                        groups that share the ranges of a row: 1, or G
#pragma once
#include "warp.cuh"

constexpr bool COMPRESSED = COMPRESS_BLOCK > 0, BY_ARITHMETIC = COMPRESSED || WINDOW;
constexpr bool CACHED = PAGE >= 0 && !JOINED, PAGED = PAGE > 0;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

DEVICE float infinity() { return __int_as_float(0x7f800000); }

// If<C, A, B> is A if C, else B.
template <bool CONDITION, class A, class B> struct Choice { typedef A Type; };
template <class A, class B> struct Choice<false, A, B> { typedef B Type; };
template <bool CONDITION, class A, class B> using If = typename Choice<CONDITION, A, B>::Type;

// The smallest unsigned integer type with one bit for each of N rows of a tile. sm90.py allocates the same.
template <int N> using RowBits = If<N <= 8, unsigned char, If<N <= 16, u16, If<N <= 32, u32, u64>>>;

// q or do [B,S,G,h,D], any strides.
struct HeadsTensor {
    const u16 *data;
    i64 stride_b, stride_s, stride_g, stride_h;
    DEVICE const u16 *group(i64 b, i64 g) const { return data + b * stride_b + g * stride_g; }  // row 0
    DEVICE const u16 *heads(i64 b, i64 s, i64 g) const { return data + b * stride_b + s * stride_s + g * stride_g; }
};

// k or v [B,G,S_kv,D], or a page pool [pages,G,PAGE,D], any strides.
struct KeysTensor {
    const u16 *data;
    i64 stride_b, stride_g, stride_n;
    DEVICE const u16 *keys(i64 b, i64 g) const { return data + b * stride_b + g * stride_g; }
};

// The call, as every kernel receives it. All fields have 8 bytes, so that there is no padding (launch.py packs it).
struct Problem {
    HeadsTensor q;       // [B,S,G,h,DK]
    KeysTensor k, v;     // [B,G,S_kv,DK], [B,G,S_kv,DV]
    const char *q_pos;   // [B,S], or null: positions are S_kv - S + s; CACHED: lengths [B], positions are lengths[b] - S + s
    i64 stride_pb, stride_ps;
    const char *ranges;  // [B,S,G/SHARED_BY,n,2], or block indices [B,S,G/SHARED_BY,n], contiguous
    i64 pos_bytes, range_bytes;  // bytes per position, and per bound of a range or per block index: 4 or 8
    i64 indexed_block;           // keys per block if `ranges` holds block indices, else 0
    i64 S, S_kv, G, h, n;        // n: ranges per row
    const int *block_table;  // [B, pages per sequence]; entries past a sequence's keys are undefined
    i64 stride_table;
    i64 start, window;  // COMPRESSED: the position of row 0. WINDOW: keys that a row sees, at most S_kv
    double scale, scale_log2;
};

// Return a pointer to element i of an array of 4- or 8-byte integers.
DEVICE const int *integer_at(const char *array, i64 bytes, i64 i) { return reinterpret_cast<const int *>(array + i * bytes); }

// A loaded 4- or 8-byte integer. Convert with value() as late as possible, because it waits for the load.
struct Integer {
    int low = 0, high = 0;
    DEVICE Integer() {}
    DEVICE Integer(const int *at, i64 bytes) : low(at[0]), high(bytes == 8 ? at[1] : 0) {}
    DEVICE i64 value(i64 bytes) const { return bytes == 8 ? static_cast<i64>(static_cast<u64>(high) << 32 | static_cast<u32>(low)) : low; }
};

// Return a pointer to the position of row s, or (CACHED) to the length of its sequence; null if positions are implied.
DEVICE const int *position_at(const Problem &p, i64 b, i64 s) {
    if (CACHED) return integer_at(p.q_pos, p.pos_bytes, b * p.stride_pb);
    return p.q_pos ? integer_at(p.q_pos, p.pos_bytes, b * p.stride_pb + s * p.stride_ps) : nullptr;
}

// Return one past the last key that row s may see, given its `position_at`; of compressed keys, their number.
DEVICE int row_limit(const Problem &p, i64 s, const int *position) {
    if constexpr (COMPRESSED) {
        const i64 past = p.start + s + 1 - COMPRESS_BLOCK;  // visible keys after those of compressed key 0
        return past < 0 ? 0 : static_cast<int>(min(past / COMPRESS_STRIDE + 1, p.S_kv));
    } else if constexpr (WINDOW) {
        return static_cast<int>(p.S_kv - p.S) + static_cast<int>(s) + 1;  // 32 bits: cheap to recompute
    } else {
        const i64 last = p.S_kv - p.S + s, at = position ? Integer(position, p.pos_bytes).value(p.pos_bytes) : last;
        return static_cast<int>(max(0ll, min(CACHED ? at - p.S + s : at, p.S_kv - 1) + 1));
    }
}
DEVICE int row_limit(const Problem &p, i64 b, i64 s) { return row_limit(p, s, position_at(p, b, s)); }

// Return whether a row does not see a key, given its `row_limit`. Both may be relative to the same first key.
DEVICE bool hidden(const Problem &p, int key, int limit) {
    if constexpr (WINDOW) return static_cast<u32>(limit - 1 - key) >= static_cast<u32>(p.window);  // distance from the row's own key
    else return key >= limit;
}

// BY_ARITHMETIC: return the first row that sees a key; S or more if none does.
DEVICE i64 first_row(const Problem &p, i64 key) {
    if constexpr (COMPRESSED) return max(0ll, key * COMPRESS_STRIDE + COMPRESS_BLOCK - 1 - p.start);
    else return max(0ll, key - (p.S_kv - p.S));
}

// Key `key` of sequence b, which must exist, is key in_page(key) of page page_of(b, key); without pages, of entry b.
constexpr int PAGE_KEYS = PAGED ? PAGE : 1;
DEVICE i64 table_row(const Problem &p, int b) { return PACKED ? *integer_at(p.q_pos, 4, b * p.stride_pb + 1) : b; }
DEVICE int page_of(const Problem &p, int b, int key) {
    if (JOINED == 2) return key / PAGE_KEYS;
    return PAGED ? p.block_table[table_row(p, b) * p.stride_table + key / PAGE_KEYS] : b;
}
DEVICE int in_page(int key) { return PAGED ? key % PAGE_KEYS : key; }

// JOINED 2: the factors of a page's keys and values, of [pages, G, 2].
struct PageFactors {
    float k, v;
};
DEVICE PageFactors page_factors(const float *factors, const Problem &p, int key, int g) {
    if (JOINED != 2) return {1.0f, 1.0f};
    factors += 2 * (static_cast<i64>(key / PAGE_KEYS) * p.G + g);
    return {factors[0], factors[1]};
}

// Clamp a range to [max(begin, 0), min(stop, limit)), before the cast: int64 bounds may exceed int32.
template <class Bound> DEVICE void clamp_bounds(Bound begin, Bound stop, int limit, int &start, int &end) {
    start = static_cast<int>(min(max(begin, Bound{0}), static_cast<Bound>(limit)));
    end = max(start, static_cast<int>(max(min(stop, static_cast<Bound>(limit)), Bound{0})));
}

// Return a pointer to range i of [B,S,G,n], or to block index i.
DEVICE const int *range_at(const Problem &p, i64 i) { return integer_at(p.ranges, p.range_bytes, p.indexed_block ? i : 2 * i); }

// A loaded range, or block index (`begin`). By default empty.
struct Range {
    Integer begin, stop;
    DEVICE Range() { begin.low = begin.high = -1; }
    DEVICE Range(const Problem &p, const int *at) : begin(at, p.range_bytes) {
        if (!p.indexed_block) stop = Integer(at + p.range_bytes / 4, p.range_bytes);
    }

    DEVICE void clamp(const Problem &p, int limit, int &start, int &end) const {
        const i64 first = begin.value(p.range_bytes);
        if (p.indexed_block) {
            const i64 key = min(max(first, -1ll), static_cast<i64>(limit)) * p.indexed_block;  // negative: padding
            clamp_bounds(key, key + p.indexed_block, limit, start, end);
        } else clamp_bounds(first, stop.value(p.range_bytes), limit, start, end);
    }
};
// Call use(e, start, end) with the range of each e < all, by THREADS threads, which load AT_ONCE at once. index(e):
// the range in [B,S,G/SHARED_BY,n]; limit(e): the `row_limit` of its row.
template <u32 THREADS, u32 AT_ONCE, class Index, class Limit, class Use>
DEVICE void for_ranges(const Problem &p, u32 all, Index index, Limit limit, Use use) {
    for (u32 from = threadIdx.x; from < all; from += THREADS * AT_ONCE) {
        Range loaded[AT_ONCE];
        UNROLL for (u32 i = 0; i < AT_ONCE; ++i)
            if (from + i * THREADS < all) loaded[i] = Range(p, range_at(p, index(from + i * THREADS)));
        UNROLL for (u32 i = 0; i < AT_ONCE; ++i) {
            const u32 e = from + i * THREADS;
            if (e >= all) break;
            int start, end;
            loaded[i].clamp(p, limit(e), start, end);
            use(e, start, end);
        }
    }
}
// Return the row of `ranges` [B,S,G/SHARED_BY] that a row of [B,S,G] has.
DEVICE i64 ranges_row(i64 row) { return row / SHARED_BY; }
DEVICE void clamped_range(const Problem &p, i64 i, int limit, int &start, int &end) {
    Range(p, range_at(p, i)).clamp(p, limit, start, end);
}

// Query row s of batch entry b and group g, and its index in [B,S,G].
struct Row {
    i64 b, s, g, index;
};

// Return row `pid` in the order [B,G,S], so that adjacent CTAs share a group, and often keys.
DEVICE Row row_of(const Problem &p, u32 pid) {  // 32 bits: a grid has fewer than 2^31 CTAs, and 64-bit divisions are slow
    const u32 S = p.S, G = p.G;
    Row row;
    row.s = pid % S;
    row.b = pid / S / G;
    row.g = pid / S % G;
    row.index = (row.b * p.S + row.s) * p.G + row.g;
    return row;
}
