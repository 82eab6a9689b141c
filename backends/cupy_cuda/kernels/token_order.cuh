// Tiles whose tokens are not adjacent, but those of a stretch of ORDER_TOKENS tokens that selected alike (ordered_union.cu).
//
// Place i of a stretch holds token `order[i]` of it. Tiles and their warpgroups are made of adjacent places; a stretch is whole tiles.
// Without ORDER_TOKENS tokens are where they are.
#pragma once
#include "problem.cuh"

#ifdef ORDER_TOKENS
constexpr int NO_TOKEN = 255;  // from a stretch's first token on; past the last one of the sequence
static_assert(ORDER_TOKENS <= NO_TOKEN, "one byte a token");
#endif
