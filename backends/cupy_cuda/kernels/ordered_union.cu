// Reorder tokens so that tokens with similar selections share a tile, and build the unions of the tiles' blocks, as
// tile_union.cu does.
//
// The union of adjacent tokens of trained models is up to twice the selection of one. The order within a stretch of
// ORDER_TOKENS tokens is greedy: the next token is the one that adds the fewest blocks to the union of its warpgroup's
// tokens so far, or, for a warpgroup's first token, to the union of the previous warpgroup. Ties go to the first token.
//
// Grid: one CTA per (b, g, stretch), which numbers the blocks that its tokens selected. For the order, a token's blocks
// are 64 bits: blocks that one token or all selected cost the same in any order and have no bit; others share bits if
// there are more than 64. For the lists, a block has one bit per place of the stretch; each tile takes its own bits.
//
//   ORDER_TOKENS, TOKENS, TQ, BLOCK  tokens of a stretch, of a tile, of a warpgroup; keys of a block
#include "problem.cuh"

constexpr int THREADS = 128, EACH = (ORDER_TOKENS + 31) / 32;  // tokens of a lane, words of a block's bits
constexpr u32 NO_BIT = 64, NO_BLOCK = 0xffff;
constexpr int NO_TOKEN = 255;  // past the last token of the sequence
static_assert(ORDER_TOKENS <= NO_TOKEN, "one byte per token");

struct Arguments {
    Problem p;
    u16 *blocks;                 // [tiles of all * capacity]
    RowBits<TOKENS> *rows;       // likewise; bit r: token r of the tile selected the block
    int2 *counts;                // [tiles of all]: whole blocks, all blocks
    u32 *counter;                // of tiles taken, zeroed
    unsigned char *order;        // [B,G,stretches,ORDER_TOKENS]; NO_TOKEN past the last one
    const unsigned char *given;  // the order, if the other pass has found it
    i64 tiles, capacity;         // of one bg; of a list
};

struct Stretch {
    uint2 masks[ORDER_TOKENS];           // of each token, 64 bits for the order
    int limits[ORDER_TOKENS];            // of each token, its row_limit
    unsigned char order[ORDER_TOKENS];   // the token at each place
    unsigned char places[ORDER_TOKENS];  // of each token
};

// Load the block of every range of the tokens, NO_BLOCK without keys, and count how many selected each block.
DEVICE void load_blocks(const Problem &p, u32 bg, i64 first, u32 ranges, const Stretch &stretch, u16 *selected, u32 *numbers) {
    const u32 G = p.G, n = p.n;
    const i64 begin = ((bg / G * p.S + first) * G + bg % G) * n;
    for_ranges<THREADS, 4>(
        p, ranges, [&](u32 e) { return begin + e / n * (G * n) + e % n; }, [&](u32 e) { return stretch.limits[e / n]; },
        [&](u32 e, int start, int end) {
            selected[e] = end > start ? start / BLOCK : NO_BLOCK;
            if (end > start) atomicAdd(&numbers[start / BLOCK], 1u);
        });
}

// The order, by one warp.
DEVICE void find_order(Stretch &stretch, u32 tokens) {
    const int lane = threadIdx.x % 32;
    uint2 own[EACH];
    u32 low = ~0u, high = ~0u;  // of the union; to all bits no token adds any: the first one begins
    u32 left = 0;               // bit i: the lane's i-th token has no place yet
    UNROLL for (int i = 0; i < EACH; ++i) {
        const u32 t = lane + 32 * i;
        own[i] = t < tokens ? stretch.masks[t] : make_uint2(0, 0);
        left |= static_cast<u32>(t < tokens) << i;
    }
    for (u32 place = 0, of_group = 0; place < tokens; ++place) {
        int best = 1 << 30;
        UNROLL for (int i = 0; i < EACH; ++i)
            if (left >> i & 1) best = min(best, (__popc(own[i].x & ~low) + __popc(own[i].y & ~high)) << 8 | (lane + 32 * i));
        const u32 t = __reduce_min_sync(ALL_LANES, best) & 255;
        if (t % 32 == lane) left &= ~(1u << t / 32);
        low = (of_group ? low : 0) | stretch.masks[t].x;
        high = (of_group ? high : 0) | stretch.masks[t].y;
        of_group = of_group + 1 == TQ ? 0 : of_group + 1;
        if (lane == 0) stretch.order[place] = static_cast<unsigned char>(t);
    }
}

// Bits [begin, begin + TOKENS) of a block's.
DEVICE u64 bits_of_tile(const u32 *bits, u32 begin) {
    const u32 word = begin / 32, shift = begin % 32;
    u64 found = bits[word] >> shift;
    UNROLL for (u32 i = 1; i < 3; ++i)
        if (32 * i - shift < TOKENS && word + i < EACH) found |= static_cast<u64>(bits[word + i]) << (32 * i - shift);
    return found & (TOKENS == 64 ? ~u64{0} : (u64{1} << TOKENS % 64) - 1);
}

// The list of a tile whose first place is `begin`, by one warp. blocks, bits: of `all` blocks, ascending.
DEVICE void write_list(const Arguments &x, const Stretch &stretch, i64 tile, u32 begin, const u16 *blocks, const u32 *bits, int all) {
    const int lane = threadIdx.x % 32;
    int lowest = static_cast<int>(x.p.S_kv), listed = 0, whole = 0;
    for (int r = lane; r < TOKENS; r += 32)
        if (stretch.order[begin + r] != NO_TOKEN) lowest = min(lowest, stretch.limits[stretch.order[begin + r]]);
    lowest = __reduce_min_sync(ALL_LANES, lowest);
    for (int i = lane; i - lane < all; i += 32) {
        const int block = i < all ? blocks[i] : 0;
        const u64 rows = i < all ? bits_of_tile(bits + i * EACH, begin) : 0;
        const u32 here = __ballot_sync(ALL_LANES, rows != 0);
        whole += __popc(__ballot_sync(ALL_LANES, rows && (block + 1) * static_cast<i64>(BLOCK) <= lowest));
        if (rows) {
            const i64 at = tile * x.capacity + listed + __popc(here & ((1u << lane) - 1));
            x.blocks[at] = static_cast<u16>(block);
            x.rows[at] = static_cast<RowBits<TOKENS>>(rows);
        }
        listed += __popc(here);
    }
    if (lane == 0) x.counts[tile] = make_int2(whole, listed);
}

extern "C" __global__ void __launch_bounds__(THREADS) ordered_union(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    __shared__ Stretch stretch;
    const Problem &p = x.p;
    constexpr u32 TILES = ORDER_TOKENS / TOKENS;  // of a stretch
    const int thread = threadIdx.x, all_blocks = (static_cast<int>(p.S_kv) + BLOCK - 1) / BLOCK;
    const int most = min(all_blocks, ORDER_TOKENS * static_cast<int>(p.n));  // that a stretch selects
    u32 *numbers = reinterpret_cast<u32 *>(memory), *bits = numbers + all_blocks;  // [blocks of keys]; [most][EACH]
    u16 *blocks = reinterpret_cast<u16 *>(bits + most * EACH), *selected = blocks + most;  // [most]; [tokens * n]
    const u32 all_tiles = x.tiles, stretches = (all_tiles + TILES - 1) / TILES, bg = blockIdx.x / stretches, number = blockIdx.x % stretches;
    const i64 first = static_cast<i64>(number) * ORDER_TOKENS, place0 = static_cast<i64>(blockIdx.x) * ORDER_TOKENS;
    const u32 tokens = static_cast<u32>(min(p.S - first, static_cast<i64>(ORDER_TOKENS))), n = p.n, ranges = tokens * n;

    start_next_kernel();
    if (blockIdx.x == 0 && thread == 0) *x.counter = 0;
    for (int i = thread; i < all_blocks; i += THREADS) numbers[i] = 0;
    for (int i = thread; i < ORDER_TOKENS; i += THREADS) {
        stretch.masks[i] = make_uint2(0, 0);
        stretch.limits[i] = i < tokens ? row_limit(p, bg / static_cast<u32>(p.G), first + i) : 0;
        stretch.order[i] = x.given ? x.given[place0 + i] : NO_TOKEN;
    }
    __syncthreads();
    load_blocks(p, bg, first, ranges, stretch, selected, numbers);
    __syncthreads();
    // Each thread numbers some adjacent blocks: all that were selected, and those that have a bit.
    const int share = (all_blocks + THREADS - 1) / THREADS, begin = min(thread * share, all_blocks), end = min(begin + share, all_blocks);
    auto matters = [&](int block) { return numbers[block] > 1 && numbers[block] < tokens; };
    int next[2] = {0, 0}, total[2];
    for (int block = begin; block < end; ++block) {
        next[0] += numbers[block] > 0;
        next[1] += matters(block);
    }
    const int own[2] = {next[0], next[1]};
    block_prefix_sum<THREADS>(next, total);
    next[0] -= own[0];
    next[1] -= own[1];
    for (int block = begin; block < end; ++block) {
        if (!numbers[block]) continue;
        const u32 bit = matters(block) ? next[1]++ % 64 : NO_BIT;
        blocks[next[0]] = static_cast<u16>(block);
        numbers[block] = bit << 16 | next[0]++;
    }
    for (int i = thread; i < total[0] * EACH; i += THREADS) bits[i] = 0;
    __syncthreads();
    if (!x.given) {
        for (u32 e = thread; e < ranges; e += THREADS) {
            const u32 bit = selected[e] == NO_BLOCK ? NO_BIT : numbers[selected[e]] >> 16;
            if (bit != NO_BIT) atomicOr(bit < 32 ? &stretch.masks[e / n].x : &stretch.masks[e / n].y, 1u << bit % 32);
        }
        __syncthreads();
        if (thread < 32) find_order(stretch, tokens);
        __syncthreads();
    }
    for (int i = thread; i < ORDER_TOKENS; i += THREADS) {
        const unsigned char t = stretch.order[i];
        x.order[place0 + i] = t;
        if (t != NO_TOKEN) stretch.places[t] = static_cast<unsigned char>(i);
    }
    __syncthreads();
    for (u32 e = thread; e < ranges; e += THREADS) {
        if (selected[e] == NO_BLOCK) continue;
        const u32 place = stretch.places[e / n];
        atomicOr(&bits[(numbers[selected[e]] & 0xffff) * EACH + place / 32], 1u << place % 32);
    }
    __syncthreads();
    for (u32 i = thread / 32; i < TILES && number * TILES + i < all_tiles; i += THREADS / 32)
        write_list(x, stretch, static_cast<i64>(bg) * all_tiles + number * TILES + i, i * TOKENS, blocks, bits, total[0]);
}
