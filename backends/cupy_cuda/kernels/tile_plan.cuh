// Tile scheduling: the order in which CTAs take tiles of tokens, and the list of key blocks that a tile's steps walk.
//
// Selected blocks: the list is the union of the blocks of the tile's tokens (tile_union.cu, ordered_union.cu).
// Compressed keys: blocks 0, 1, ... of BLOCK compressed keys, whole as far as the tile's first token sees them.
// Window: blocks of BLOCK keys from the first key on that the tile's first token sees, whole where all windows overlap.
//
//   ORDER_TOKENS  tiles hold tokens with similar selections instead of adjacent ones (ordered_union.cu)
//   FEW_TOKENS    a tile holds all tokens of a (b, g), and its CTA builds the list itself (few_tokens.cuh)
#pragma once
#include "few_tokens.cuh"
#include "softmax.cuh"

constexpr bool ORDERED = ORDER_TOKENS > 0;  // tiles hold tokens with similar selections
constexpr bool IN_TURNS = H == 1;  // both consumers own the same 64 tokens and alternate steps
constexpr int TQ = 64 / H, TOKENS = IN_TURNS ? TQ : CONSUMERS * TQ;
typedef If<H == 1, u64, u32> TokenBits;  // one bit per token of a consumer
constexpr TokenBits TOKEN_MASK = static_cast<TokenBits>(TQ == 64 ? ~0ull : (1ull << TQ % 64) - 1);  // all TQ bits

// The block lists of all tiles, and the scheduler's state. (The compiler spills registers if the fields are reordered.)
struct TilePlan {
    const u16 *blocks;            // [all_tiles * capacity]: union of a tile's blocks, whole ones first; null if BY_ARITHMETIC
    const RowBits<TOKENS> *rows;  // [all_tiles * capacity], bit r: token r of the tile selected the block
    const int2 *counts;           // [all_tiles]: number of whole blocks, of all blocks
    i64 tiles, capacity, all_tiles;  // tiles per (b, g), largest list length, tiles of all (b, g)
    i64 interleaved_heads;           // (b, g) whose tiles are interleaved: as many as have K and V in the L2 cache together
    u32 *tile_counter;               // tiles requested, zero before and after the kernel; null: one tile per CTA
    const unsigned char *order;      // [B,G,stretches,ORDER_TOKENS] (ordered_union.cu); null unless ORDERED

    // Request the next tile, by one warp; `tile_of` waits for the answer. A CTA requests once per tile, so the last
    // request, which gets no tile, wraps the counter to zero.
    DEVICE u32 ask_for_tile() const {
        const u32 all = static_cast<u32>(all_tiles);
        return threadIdx.x % 32 == 0 && tile_counter ? atomicInc(tile_counter, all - 1) : all;
    }
    DEVICE u32 tile_of(u32 answer) const { return gridDim.x + __shfl_sync(ALL_LANES, answer, 0); }
};

// Return which tile of a (b, g) comes at position `at`: late tokens, which see the most blocks, first. MIXED_TILES:
// late and early tokens alternate, because short tiles are bound by memory, which is idle while long tiles compute.
DEVICE u32 tile_at(u32 at, u32 tiles) {
    const u32 shortest = tiles / 16;
    if (MIXED_TILES && at < tiles - shortest) return at % 2 ? shortest + at / 2 : tiles - 1 - at / 2;
    return tiles - 1 - at;
}

// Tile `number` in scheduler order.
struct TokenTile {
    u32 i, b, g;  // tile i of (b, g)
    const unsigned char *tokens = nullptr;  // ORDERED: the token of the stretch at each position of the tile
    static constexpr u32 OF_STRETCH = ORDERED ? ORDER_TOKENS / TOKENS : 1;  // tiles per stretch

    DEVICE TokenTile(u32 number, const TilePlan &plan, u32 G) {
        const u32 tiles = plan.tiles, heads = plan.interleaved_heads, all_heads = static_cast<u32>(plan.all_tiles) / tiles;
        const u32 first = number / (tiles * heads) * heads, width = min(heads, all_heads - first), rest = number - first * tiles;
        const u32 bg = first + rest % width;
        i = tile_at(rest / width, tiles);
        b = bg / G;
        g = bg % G;
    }
    // ORDERED: the tile's tokens in the plan, which SHARED_BY groups share.
    DEVICE const unsigned char *order(const TilePlan &plan, u32 G) const {
        const u32 stretches = (static_cast<u32>(plan.tiles) + OF_STRETCH - 1) / OF_STRETCH;
        return plan.order + ((b * G + g) / SHARED_BY * (stretches * OF_STRETCH) + i) * TOKENS;
    }
    DEVICE u32 index(const TilePlan &plan, u32 G) const { return (b * G + g) / SHARED_BY * static_cast<u32>(plan.tiles) + i; }
    // The position of a consumer's first token.
    DEVICE i64 position(int consumer) const { return static_cast<i64>(i) * TOKENS + (IN_TURNS ? 0 : consumer * TQ); }
    // A consumer's token number `at`; S or more if it does not exist.
    DEVICE i64 token(int consumer, int at) const {
        if constexpr (ORDERED) return i / OF_STRETCH * ORDER_TOKENS + tokens[consumer * TQ + at];
        else return position(consumer) + at;
    }
};

// block_counts: whole blocks, and all blocks, of a tile. block_key, selected_by: first key, and tokens, of entry `at`
// of its list, in which whole blocks come first.

// The union that the CTA has built (FEW_TOKENS).
struct OwnUnion {
    DEVICE static int2 block_counts(const Problem &, const TilePlan &, const TokenTile &) { return union_counts; }
    DEVICE static int block_key(const Problem &, const TilePlan &, const TokenTile &, i64 at) {
        return (union_entries[at] >> TOKEN_BITS) * BLOCK;
    }
    DEVICE static u64 selected_by(const Problem &, const TilePlan &, const TokenTile &, i64 at) {
        return union_entries[at] & ((1u << TOKEN_BITS) - 1);
    }
};
struct PlannedUnion {
    DEVICE static int2 block_counts(const Problem &p, const TilePlan &plan, const TokenTile &tile) { return plan.counts[tile.index(plan, p.G)]; }
    DEVICE static int block_key(const Problem &p, const TilePlan &plan, const TokenTile &tile, i64 at) {
        return plan.blocks[tile.index(plan, p.G) * plan.capacity + at] * BLOCK;
    }
    DEVICE static u64 selected_by(const Problem &p, const TilePlan &plan, const TokenTile &tile, i64 at) {
        return plan.rows[tile.index(plan, p.G) * plan.capacity + at];
    }
    // Load entry `at` to the L1 cache.
    DEVICE static void prefetch(const Problem &p, const TilePlan &plan, const TokenTile &tile, i64 at) {
        const i64 index = tile.index(plan, p.G) * plan.capacity + min(at, plan.capacity - 1);
        prefetch_l1(plan.blocks + index);
        prefetch_l1(plan.rows + index);
    }
};
// `row_limit` of a tile's first and last token, and the first key that each of them sees.
struct TileLimits {
    int first, last, first_key = 0, last_key = 0;
    DEVICE TileLimits(const Problem &p, const TokenTile &tile) {
        const i64 token = tile.position(0);
        first = row_limit(p, tile.b, token);
        last = row_limit(p, tile.b, min(token + TOKENS, p.S) - 1);
        if (!WINDOW) return;
        first_key = max(0, first - static_cast<int>(p.window));
        last_key = max(0, last - static_cast<int>(p.window));
    }
    // Return the blocks at the beginning that the last token does not see whole.
    DEVICE int leading() const { return (last_key - first_key + BLOCK - 1) / BLOCK; }
};
struct ComputedUnion {
    DEVICE static int2 block_counts(const Problem &p, const TilePlan &, const TokenTile &tile) {
        const TileLimits limits(p, tile);
        const int seen_by_first = (limits.first - limits.first_key) / BLOCK;
        return make_int2(max(seen_by_first - limits.leading(), 0), (limits.last - limits.first_key + BLOCK - 1) / BLOCK);
    }
    DEVICE static int block_key(const Problem &p, const TilePlan &plan, const TokenTile &tile, i64 at) {
        if (!WINDOW) return static_cast<int>(at) * BLOCK;
        const TileLimits limits(p, tile);
        const int whole = block_counts(p, plan, tile).x, leading = limits.leading(), number = static_cast<int>(at);
        const int block = number < whole ? leading + number : number - whole < leading ? number - whole : number;
        return limits.first_key + block * BLOCK;
    }
    // All tokens that exist; keys of a partial block that a token does not see are masked one by one.
    DEVICE static u64 selected_by(const Problem &p, const TilePlan &, const TokenTile &tile, i64) {
        const i64 exist = p.S - tile.position(0);
        return exist < TOKENS ? (1ull << exist) - 1 : ~0ull;
    }
};
typedef If<FEW_TOKENS, OwnUnion, If<BY_ARITHMETIC, ComputedUnion, PlannedUnion>> Union;

// Return the list entry of block e in the order of the tile's steps: partial blocks first, then whole ones.
DEVICE int list_offset(int2 counts, int e) {
    const int partial = counts.y - counts.x;
    return e < partial ? counts.x + e : e - partial;
}
