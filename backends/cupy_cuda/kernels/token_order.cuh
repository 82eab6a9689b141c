// Tiles of tokens with similar selections, taken from a stretch of ORDER_TOKENS tokens, instead of adjacent tokens
// (ordered_union.cu).
//
// Position i of a stretch holds its token `order[i]`. Tiles and their warpgroups take adjacent positions; a stretch is
// whole tiles. Without ORDER_TOKENS, tiles take adjacent tokens.
#pragma once
#include "problem.cuh"

#if ORDER_TOKENS
constexpr int NO_TOKEN = 255;  // from a stretch's first token on; past the last one of the sequence
static_assert(ORDER_TOKENS <= NO_TOKEN, "one byte a token");
#endif
