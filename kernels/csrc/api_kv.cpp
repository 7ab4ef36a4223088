// The C interface to the paged KV memory: writing cells and attending over them. Indices are checked here; see api.cpp.
#include "split.h"

using namespace hwk;

HWK_API int hwk_write_kv(hwk_context* context, const float* k, int64_t ldk, const float* v, int64_t ldv, int64_t rows,
                         int64_t kv_heads, int64_t dim, uint8_t* cells, int32_t kv_format, int64_t num_cells,
                         const int64_t* slots) {
  if (!all_below(slots, rows, num_cells)) return kOutOfRange;
  WriteKv args{k, v, cells, slots, rows, kv_heads, dim, num_cells, ldk, ldv, kv_format};
  spread(context, args, context->level.write_kv, rows, 2 * kv_heads * dim);
  return kDone;
}

HWK_API int hwk_attention(hwk_context* context, const float* q, int64_t ldq, int64_t rows, int64_t heads,
                          int64_t kv_heads, int64_t dim, const uint8_t* kv, int32_t kv_format, int64_t num_blocks,
                          int64_t block_size, const int32_t* tables, int64_t num_tables, int64_t table_width,
                          const int32_t* row_of, const int64_t* positions, float scale, int64_t window, float cap,
                          float* y) {
  if (rows == 0) return kDone;
  std::lock_guard<std::mutex> lock(context->mutex);
  Attention args{q,   kv,  tables,     row_of,     positions,   nullptr, y,         rows,   heads, kv_heads,
                 dim, ldq, num_blocks, block_size, table_width, scale,   kv_format, window, cap};
  AttentionCall call{args, context, cut_queries(args, num_tables, context->blocks)};
  if (call.total < 0) return kOutOfRange;
  args.blocks = context->blocks.data();
  auto needed = static_cast<size_t>(attention_scratch(heads, kv_heads, dim));
  for (auto& scratch : context->scratch)
    if (scratch.size() < needed) scratch.resize(needed);
  if (call.total * heads * dim < kWorthThreads) {
    call.part(0, 1);
  } else {
    auto part = [](void* argument, int index, int count) { static_cast<AttentionCall*>(argument)->part(index, count); };
    context->pool.run(part, &call);
  }
  return call.found.load() ? kDone : kOutOfRange;
}
