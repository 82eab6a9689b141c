// Which tile of tokens a CTA takes, and which blocks of keys the tile's steps go through.
//
// Selected blocks come from lists, the union of a tile's tokens (tile_union.cu, ordered_union.cu). Of compressed keys every token sees the
// first ones, so that the list is arithmetic: blocks 0, 1, ... of BLOCK compressed keys, whole as far as the tile's first token sees them.
// For a window it is arithmetic, too: blocks of BLOCK keys from the first key that the tile's first token sees, whole where the windows of
// all its tokens overlap.
//
//   ORDER_TOKENS  tiles are of tokens that selected alike (token_order.cuh)
//   FEW_TOKENS    a tile has all tokens of a (b, g), and its CTA makes the list (few_tokens.cuh)
#pragma once
#ifdef FEW_TOKENS
#include "few_tokens.cuh"
#endif
#include "softmax.cuh"
#include "token_order.cuh"

constexpr bool IN_TURNS = H == 1;  // the consumers have the same 64 tokens, and take the steps in turn
constexpr int TQ = 64 / H, TOKENS = IN_TURNS ? TQ : CONSUMERS * TQ;
#if H == 1
typedef u64 TokenBits;  // a bit for each token of a consumer
#else
typedef u32 TokenBits;
#endif
constexpr TokenBits TOKEN_MASK = static_cast<TokenBits>(TQ == 64 ? ~0ull : (1ull << TQ % 64) - 1);  // of a consumer

// The lists of all tiles, and the order in which CTAs take tiles. (With its fields in another order the compiler spills registers.)
struct TilePlan {
    const u16 *blocks;            // [all_tiles * capacity]: the union of a tile's blocks, whole ones first; lists are null if BY_ARITHMETIC
    const RowBits<TOKENS> *rows;  // bit r: token r of the tile selected the block
    const int2 *counts;           // [all_tiles]: whole blocks, all blocks
    i64 tiles, capacity, all_tiles;  // tiles of one (b, g), blocks of a list at most
    i64 interleaved_heads;           // (b, g) whose tiles are interleaved: as many as have K and V in the L2 cache together
    u32 *tile_counter;               // tiles asked for, zero at first and at the end; null if there are none beyond each CTA's first
#ifdef ORDER_TOKENS
    const unsigned char *order;  // [B,G,stretches,ORDER_TOKENS] (token_order.cuh)
#endif

    // One warp asks for a tile that no other CTA has; `tile_of` waits for the answer. It asks once in each tile, so that the last one to ask,
    // who gets none, zeroes the counter.
    DEVICE u32 ask_for_tile() const {
        const u32 all = static_cast<u32>(all_tiles);
        return threadIdx.x % 32 == 0 && tile_counter ? atomicInc(tile_counter, all - 1) : all;
    }
    DEVICE u32 tile_of(u32 answer) const { return gridDim.x + __shfl_sync(ALL_LANES, answer, 0); }
};

// The tile that a (b, g) takes as number `at`: late tokens, which see the most blocks, first; the last tiles are short then.
// MIXED_TILES: tiles of late and of early tokens alternate, and the shortest come last. The short ones wait for their rows from memory,
// which is idle while long ones compute.
DEVICE u32 tile_at(u32 at, u32 tiles) {
#ifdef MIXED_TILES
    const u32 shortest = tiles / 16;
    if (at < tiles - shortest) return at % 2 ? shortest + at / 2 : tiles - 1 - at / 2;
#endif
    return tiles - 1 - at;
}

// Tile number `number` in the order of the scheduler.
struct TokenTile {
    u32 i, b, g;  // tile i of (b, g)
#ifdef ORDER_TOKENS
    const unsigned char *tokens;  // which token of the stretch is at each place of the tile
#endif
    DEVICE TokenTile(u32 number, const TilePlan &plan, u32 G) {
        const u32 tiles = plan.tiles, heads = plan.interleaved_heads, all_heads = static_cast<u32>(plan.all_tiles) / tiles;
        const u32 first = number / (tiles * heads) * heads, width = min(heads, all_heads - first), rest = number - first * tiles;
        const u32 bg = first + rest % width;
        i = tile_at(rest / width, tiles);
        b = bg / G;
        g = bg % G;
    }
#ifdef ORDER_TOKENS
    static constexpr u32 OF_STRETCH = ORDER_TOKENS / TOKENS;  // tiles
    DEVICE const unsigned char *order(const TilePlan &plan, u32 G) const {
        const u32 stretches = (static_cast<u32>(plan.tiles) + OF_STRETCH - 1) / OF_STRETCH;
        return plan.order + ((b * G + g) * (stretches * OF_STRETCH) + i) * TOKENS;
    }
#endif
    DEVICE u32 index(const TilePlan &plan, u32 G) const { return (b * G + g) * static_cast<u32>(plan.tiles) + i; }  // among all lists
    DEVICE i64 place(int consumer) const { return static_cast<i64>(i) * TOKENS + (IN_TURNS ? 0 : consumer * TQ); }  // the first of a consumer
    // A consumer's token number `at`; S or more if there is none.
    DEVICE i64 token(int consumer, int at) const {
#ifdef ORDER_TOKENS
        return i / OF_STRETCH * ORDER_TOKENS + tokens[consumer * TQ + at];
#else
        return place(consumer) + at;
#endif
    }
};

// The blocks of a tile: how many are whole, and how many there are; then the first key of block number `at` of its list, and which tokens
// selected it. A tile's steps begin with its partial blocks; in the list, whole blocks come first.
#ifdef FEW_TOKENS
DEVICE int2 block_counts(const Problem &, const TilePlan &, const TokenTile &) { return union_counts; }
DEVICE int block_key(const Problem &, const TilePlan &, const TokenTile &, i64 at) { return (union_entries[at] >> TOKEN_BITS) * BLOCK; }
DEVICE u64 selected_by(const Problem &, const TilePlan &, const TokenTile &, i64 at) {
    return union_entries[at] & ((1u << TOKEN_BITS) - 1);
}
#elif !defined(BY_ARITHMETIC)
DEVICE int2 block_counts(const Problem &p, const TilePlan &plan, const TokenTile &tile) { return plan.counts[tile.index(plan, p.G)]; }
DEVICE int block_key(const Problem &p, const TilePlan &plan, const TokenTile &tile, i64 at) {
    return plan.blocks[tile.index(plan, p.G) * plan.capacity + at] * BLOCK;
}
DEVICE u64 selected_by(const Problem &p, const TilePlan &plan, const TokenTile &tile, i64 at) {
    return plan.rows[tile.index(plan, p.G) * plan.capacity + at];
}
#else
// `row_limit` of a tile's first and last token, and the keys that each of them sees first.
struct TileLimits {
    int first, last, first_key, last_key;
    DEVICE TileLimits(const Problem &p, const TokenTile &tile) {
        const i64 token = tile.place(0);
        first = row_limit(p, tile.b, token);
        last = row_limit(p, tile.b, min(token + TOKENS, p.S) - 1);
#ifdef WINDOW
        first_key = max(0, first - static_cast<int>(p.window));
        last_key = max(0, last - static_cast<int>(p.window));
#else
        first_key = last_key = 0;
#endif
    }
    // Blocks at the beginning that the last token does not see all of.
    DEVICE int leading() const { return (last_key - first_key + BLOCK - 1) / BLOCK; }
};
DEVICE int2 block_counts(const Problem &p, const TilePlan &, const TokenTile &tile) {
    const TileLimits limits(p, tile);
    const int seen_by_first = (limits.first - limits.first_key) / BLOCK;
    return make_int2(max(seen_by_first - limits.leading(), 0), (limits.last - limits.first_key + BLOCK - 1) / BLOCK);
}
DEVICE int block_key(const Problem &p, const TilePlan &plan, const TokenTile &tile, i64 at) {
#ifdef WINDOW
    const TileLimits limits(p, tile);
    const int whole = block_counts(p, plan, tile).x, leading = limits.leading(), number = static_cast<int>(at);
    const int block = number < whole ? leading + number : number - whole < leading ? number - whole : number;
    return limits.first_key + block * BLOCK;
#else
    return static_cast<int>(at) * BLOCK;
#endif
}
// All tokens that exist; what a token does not see of a partial block is masked key by key.
DEVICE u64 selected_by(const Problem &p, const TilePlan &, const TokenTile &tile, i64) {
    const i64 exist = p.S - tile.place(0);
    return exist < TOKENS ? (1ull << exist) - 1 : ~0ull;
}
#endif

// Where block e of a tile, in the order of its steps, is in its list.
DEVICE int list_offset(int2 counts, int e) {
    const int partial = counts.y - counts.x;
    return e < partial ? counts.x + e : e - partial;
}
