// How the queries of a step are cut into blocks and shared out over threads, evenly by the keys they see.
#pragma once

#include "context.h"

namespace hwk {

// Cuts tokens into blocks of adjacent queries of one row; returns the number of keys over all of them, or -1.
inline int64_t cut_queries(const Attention& a, int64_t num_tables, std::vector<QueryBlock>& blocks) {
  constexpr int64_t kFixedCost = 16;  // of a query, in keys
  blocks.clear();
  int64_t total = 0, begin = 0;  // of the row
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.row_of[t] < 0 || a.row_of[t] >= num_tables) return -1;
    if (a.positions[t] < 0 || a.positions[t] >= a.table_width * a.block_size) return -1;
    if (t == 0 || a.row_of[t] != a.row_of[t - 1]) begin = t;
    if (t == begin || blocks.back().count == kQueryBlock) blocks.push_back({t, 0, total, t - begin >= kQueryBlock});
    ++blocks.back().count;
    if (t - begin == kQueryBlock) blocks[blocks.size() - 2].is_of_many = true;
    total += a.positions[t] + 1 - a.nearest(t) + kFixedCost;
  }
  return total;
}

// The part at which a thread begins when earlier threads take `share` of `of` of the keys.
inline int64_t boundary(const std::vector<QueryBlock>& blocks, int64_t kv_heads, int64_t total, int64_t share,
                        int64_t of) {
  int64_t size = static_cast<int64_t>(blocks.size());
  if (share == of) return size * kv_heads;
  int64_t target = total * kv_heads * share / of;
  int64_t low = 0, high = size;  // the last block whose earlier cost is <= target
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    (blocks[static_cast<size_t>(middle)].cost * kv_heads <= target ? low : high) = middle;
  }
  int64_t begin = blocks[static_cast<size_t>(low)].cost;
  int64_t cost = (low + 1 < size ? blocks[static_cast<size_t>(low) + 1].cost : total) - begin;
  return low * kv_heads + (target - begin * kv_heads + cost / 2) / cost;
}

struct AttentionCall {
  const Attention& args;
  hwk_context* context;
  int64_t total;
  std::atomic<bool> found{true};

  void part(int index, int count) {
    auto part_at = [&](int share) { return boundary(context->blocks, args.kv_heads, total, share, count); };
    float* scratch = context->scratch[static_cast<size_t>(index)].data();
    if (!context->level.attention(args, part_at(index), part_at(index + 1), scratch)) found.store(false);
  }
};

}  // namespace hwk
