// The rows that see a tile of keys through a window, in steps of adjacent tokens. dkdv_groups.cu walks these instead of
// a list.
#pragma once
#include "problem.cuh"

// Rows that see any of WIDTH keys from `first_key` on, in steps of TOKENS rows.
template <int WIDTH, int TOKENS>
struct WindowRows {
    i64 first, count;  // the rows [first, first + count)
    int steps;
    int begun, over;   // in the steps [begun, over) every row sees all keys of the tile
    int rotation;      // leading steps that are processed last: see `step_at`

    DEVICE WindowRows(const Problem &p, i64 first_key) : first(first_row(p, first_key)) {
        const i64 last_key = min(first_key + WIDTH, p.S_kv) - 1;
        count = max(min(first_row(p, last_key + p.window), p.S) - first, 0ll);
        steps = static_cast<int>((count + TOKENS - 1) / TOKENS);
        begun = static_cast<int>((first_row(p, last_key) - first + TOKENS - 1) / TOKENS);
        over = static_cast<int>((first_row(p, first_key + p.window) - first) / TOKENS);
        rotation = steps ? static_cast<u32>(first / TOKENS) % static_cast<u32>(steps) : 0;
    }
    // Return the step at position `i` of the processing order. CTAs of adjacent tiles read nearly the same rows, which
    // together exceed the L2 cache. Each CTA starts at a multiple of its number of steps, counted from row 0, so that
    // they read the same rows at the same time.
    DEVICE int step_at(int i) const { return i < rotation ? i + steps - rotation : i - rotation; }
};
