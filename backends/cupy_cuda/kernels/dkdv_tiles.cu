// dk and dv without atomics, on any GPU from sm_80, over the rows that selected a tile of keys (key_to_rows.cuh).
//
//   p^T = 2^(c k q^T - lse),  ds^T = p^T * (v do^T - delta),  dv = sum p^T do,  dk = scale * sum ds^T q
//
// Grid: one CTA per segment of a list. The order of all sums is fixed, whichever CTA runs first.
// Tiles: WIDTH keys by QUERIES queries, which are (listed row, head) pairs, so that any number of heads fills a step.
//   Products are transposed, as in dkdv_groups.cu.
// Loads: cp.async, double-buffered; no TMA, because rows are scattered.
// Masks: a query sees keys [low, high) of the tile. Others may hold NaN, so p and ds are replaced by 0.
//
//   KEY_WARPS     warps along the keys, 16 keys each: WIDTH = 16 * KEY_WARPS
//   COLUMN_WARPS  1, or 2 for wide heads: two warps share 16 keys, with half of the columns of dk and dv each
//   QUERIES       16 or 32
#include "key_to_rows.cuh"
#include "mma.cuh"

constexpr int WIDTH = 16 * KEY_WARPS;
constexpr int THREADS = 32 * KEY_WARPS * COLUMN_WARPS;
constexpr int STAGE = QUERIES * (KP + VP);  // elements per buffer: the queries' q, then their do
constexpr int DK_TILES = (DKP / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS, DV_TILES = (DVP / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS;
static_assert(QUERIES <= THREADS, "a thread describes a query");

struct Arguments {
    Problem p;
    HeadsTensor d_o;           // [B,S,G,h,DV]
    const float *lse, *delta;  // [rows, h], lse natural
    KeyToRows lists;
    KeyGradients to;
};

// A query: offsets of its q and do, the keys [low, high) of the tile that it sees, base-2 lse, delta.
struct Query {
    i64 q = -1, d_o = -1;  // offsets; negative if the query does not exist
    int low = 0, high = 0;
    float lse = 0.0f, delta = 0.0f;
};

struct Queries {
    i64 q[QUERIES], d_o[QUERIES];
    int low[QUERIES], high[QUERIES];
    float lse[QUERIES], delta[QUERIES];
    DEVICE void set(int i, const Query &query) {
        q[i] = query.q;
        d_o[i] = query.d_o;
        low[i] = query.low;
        high[i] = query.high;
        lse[i] = query.lse;
        delta[i] = query.delta;
    }
};

// The queries of a segment: thread i < QUERIES describes query i of every step.
struct QueryReader {
    const Arguments &x;
    const Segment<WIDTH> &segment;
    const u32 h = x.p.h, queries = static_cast<u32>(segment.end - segment.begin) * h, steps = (queries + QUERIES - 1) / QUERIES;
    const bool describes = threadIdx.x < QUERIES;

    // Return the query's entry, -1 if none. Read one step before `describe`, whose addresses depend on it.
    DEVICE int entry(u32 step) const {
        const u32 query = step * QUERIES + threadIdx.x;
        return describes && query < queries ? x.lists.entries[segment.begin + query / h] : -1;
    }

    DEVICE Query describe(u32 step, int entry) const {
        Query query;
        if (entry < 0) return query;
        const Problem &p = x.p;
        const u32 e = static_cast<u32>(entry), reach = x.lists.reach, row_entries = static_cast<u32>(p.n) * reach;
        const i64 head = (step * QUERIES + threadIdx.x) % h, s = e / row_entries, row = (segment.b * p.S + s) * p.G + segment.g;
        int start, end;
        clamped_range(p, ranges_row(row) * p.n + e % row_entries / reach, row_limit(p, segment.b, s), start, end);
        query.q = s * p.q.stride_s + head * p.q.stride_h;
        query.d_o = s * x.d_o.stride_s + head * x.d_o.stride_h;
        query.low = max(start - segment.first_key, 0);
        query.high = min(end - segment.first_key, WIDTH);
        query.lse = x.lse[row * p.h + head] * LOG2_E;
        query.delta = x.delta[row * p.h + head];
        return query;
    }
};

DEVICE void copy_queries(u16 *buffer, const u16 *q, const u16 *d_o, const Queries &queries) {
    copy_rows<DK, KP, QUERIES, THREADS>(buffer, q, [&](int r) { return RowSource{queries.q[r], queries.q[r] >= 0}; });
    copy_rows<DV, VP, QUERIES, THREADS>(buffer + QUERIES * KP, d_o, [&](int r) { return RowSource{queries.d_o[r], queries.d_o[r] >= 0}; });
    cp_async_commit();
}

// Replace s^T and dp^T by p^T and ds^T, for the warp's keys from `key0` on.
DEVICE void probabilities(float (&s)[QUERIES / 8][4], float (&dp)[QUERIES / 8][4], const Queries &queries, int key0, float c) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int j = 0; j < QUERIES / 8; ++j)
        UNROLL for (int i = 0; i < 4; ++i) {
            const int query = 8 * j + lane % 4 * 2 + i % 2, key = key0 + lane / 4 + i / 2 * 8;
            const bool visible = key >= queries.low[query] && key < queries.high[query];
            const float p = exp2_fast(s[j][i] * c - queries.lse[query]);
            dp[j][i] = visible ? p * (dp[j][i] - queries.delta[query]) : 0.0f;
            s[j][i] = visible ? p : 0.0f;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) dkdv_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];  // the tile's k and v, then two buffers
    __shared__ Queries described[3];               // this step, the next (being copied), and the one after
    if (cta_of_group() >= x.lists.segments[x.lists.lists]) return;
    const Problem &p = x.p;
    const Segment<WIDTH> segment(x.lists, p.G, segment_at(x.lists, cta_of_group()));
    const QueryReader reader{x, segment};
    const int warp = threadIdx.x / 32, key0 = warp % KEY_WARPS * 16, half = warp / KEY_WARPS;

    u16 *k_tile = memory, *v_tile = k_tile + WIDTH * KP, *buffers = v_tile + WIDTH * VP;
    const u16 *q_base = p.q.group(segment.b, segment.g), *do_base = x.d_o.group(segment.b, segment.g);
    copy_rows<DK, KP, WIDTH, THREADS>(k_tile, p.k.keys(segment.b, segment.g), [&](int r) {
        return RowSource{(segment.first_key + r) * p.k.stride_n, segment.first_key + r < p.S_kv};
    });
    copy_rows<DV, VP, WIDTH, THREADS>(v_tile, p.v.keys(segment.b, segment.g), [&](int r) {
        return RowSource{(segment.first_key + r) * p.v.stride_n, segment.first_key + r < p.S_kv};
    });
    if (reader.describes) {
        described[0].set(threadIdx.x, reader.describe(0, reader.entry(0)));
        described[1].set(threadIdx.x, reader.describe(1, reader.entry(1)));
    }
    i64 coming = reader.entry(2);
    __syncthreads();
    copy_queries(buffers, q_base, do_base, described[0]);

    float dk[2 * DK_TILES][4] = {}, dv[2 * DV_TILES][4] = {};
    for (u32 step = 0; step < reader.steps; ++step) {
        cp_async_wait<0>();
        __syncthreads();  // this step's rows and the next step's queries have arrived, and the previous step has been read
        if (step + 1 < reader.steps) copy_queries(buffers + (step + 1) % 2 * STAGE, q_base, do_base, described[(step + 1) % 3]);
        Query next;
        if (reader.describes) next = reader.describe(step + 2, coming);
        coming = reader.entry(step + 3);

        const u16 *q_tile = buffers + step % 2 * STAGE, *do_tile = q_tile + QUERIES * KP;
        float s[QUERIES / 8][4] = {}, dp[QUERIES / 8][4] = {};
        add_a_bt<KP, DKP / 16>(s, k_tile, key0, q_tile);
        add_a_bt<VP, DVP / 16>(dp, v_tile, key0, do_tile);
        probabilities(s, dp, described[step % 3], key0, p.scale_log2);
        add_s_b<VP, DVP>(dv, s, do_tile, half * 16 * DV_TILES);
        add_s_b<KP, DKP>(dk, dp, q_tile, half * 16 * DK_TILES);
        if (reader.describes) described[(step + 2) % 3].set(threadIdx.x, next);  // last read in the previous step
    }
    const GradientRows rows(segment, x.lists, p.S_kv, key0);
    rows.write<DK>(dk, static_cast<float>(p.scale), half * 16 * DK_TILES, x.to.part_dk, x.to.dk);
    rows.write<DV>(dv, 1.0f, half * 16 * DV_TILES, x.to.part_dv, x.to.dv);
}
