// The C interface: picks the level, checks every index before memory is touched with it, and splits calls over threads.
//
// Shapes, strides and contiguity are the caller's promise (headway.kernels.native checks them); values that arrive in
// tensors (tokens, positions, slots, block tables) are checked here. Status: 0 done, 1 an index is out of range.
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "level.h"
#include "pool.h"

namespace {

using namespace hwk;

enum LevelId { kLevelGeneric = 0, kLevelAvx2 = 1, kLevelAvx512 = 2 };

int best_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
    return kLevelAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kLevelAvx2;
#endif
  return kLevelGeneric;
}

const Level& level_of(int id) {
#if defined(__x86_64__)
  if (id == kLevelAvx512) return kAvx512;
  if (id == kLevelAvx2) return kAvx2;
#endif
  (void)id;
  return kGeneric;
}

constexpr int kDone = 0, kOutOfRange = 1;
constexpr int64_t kWorthThreads = 32 * 1024;  // floats touched; below it, waking a worker costs more than it saves

bool all_below(const int64_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) return false;
  return true;
}

}  // namespace

// Threads, level and scratch of one owner. Calls on it are serialized by `mutex`.
struct hwk_context {
  hwk_context(int threads, int level_id) : pool(threads), level(level_of(level_id)), scratch(threads) {}
  Pool pool;
  const Level& level;
  std::mutex mutex;
  std::vector<std::vector<float>> scratch;  // one per thread
  std::vector<QueryBlock> blocks;
};

namespace {

// An even, fixed split of `parts` over the threads.
template <class Args>
void spread(hwk_context* context, const Args& args, void (*kernel)(const Args&, int64_t, int64_t), int64_t parts,
            int64_t floats_per_part) {
  if (parts * floats_per_part < kWorthThreads || parts < 2) return kernel(args, 0, parts);
  struct Call {
    const Args& args;
    void (*kernel)(const Args&, int64_t, int64_t);
    int64_t parts;
  } call{args, kernel, parts};
  std::lock_guard<std::mutex> lock(context->mutex);
  context->pool.run(
      [](void* argument, int part, int count) {
        auto& c = *static_cast<Call*>(argument);
        c.kernel(c.args, c.parts * part / count, c.parts * (part + 1) / count);
      },
      &call);
}

// Cuts tokens into blocks of adjacent queries of one row; returns the number of keys over all of them, or -1.
int64_t cut_queries(const Attention& a, int64_t num_tables, std::vector<QueryBlock>& blocks) {
  constexpr int64_t kFixedCost = 16;  // of a query, in keys
  blocks.clear();
  int64_t total = 0;
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.row_of[t] < 0 || a.row_of[t] >= num_tables) return -1;
    if (a.positions[t] < 0 || a.positions[t] >= a.table_width * a.block_size) return -1;
    if (t == 0 || a.row_of[t] != a.row_of[t - 1] || blocks.back().count == kQueryBlock)
      blocks.push_back({t, 0, total});
    ++blocks.back().count;
    total += a.positions[t] + 1 + kFixedCost;
  }
  return total;
}

struct AttentionCall {
  const Attention& args;
  hwk_context* context;
  int64_t total;
  std::atomic<bool> found{true};

  // The part at which a thread begins when earlier threads take `share` of `of` of the keys.
  int64_t boundary(int64_t share, int64_t of) const {
    const auto& blocks = context->blocks;
    int64_t kv_heads = args.kv_heads, size = static_cast<int64_t>(blocks.size());
    if (share == of) return size * kv_heads;
    int64_t target = total * kv_heads * share / of;
    int64_t low = 0, high = size;  // the last block whose earlier cost is <= target
    while (high - low > 1) {
      int64_t middle = (low + high) / 2;
      (blocks[middle].cost * kv_heads <= target ? low : high) = middle;
    }
    int64_t next = low + 1 < size ? blocks[low + 1].cost : total;
    int64_t cost = next - blocks[low].cost;
    return low * kv_heads + (target - blocks[low].cost * kv_heads + cost / 2) / cost;
  }

  void part(int index, int count) {
    float* scratch = context->scratch[static_cast<size_t>(index)].data();
    if (!context->level.attention(args, boundary(index, count), boundary(index + 1, count), scratch))
      found.store(false);
  }
};

}  // namespace

#define HWK_API extern "C" __attribute__((visibility("default")))

HWK_API int hwk_abi() { return 1; }

HWK_API int hwk_best_level() { return best_level(); }

// Null when this machine cannot run the level, threads < 1, or a thread cannot be made.
HWK_API hwk_context* hwk_create(int threads, int level_id) {
  if (threads < 1 || level_id < 0 || level_id > best_level()) return nullptr;
  try {
    return new hwk_context(threads, level_id);
  } catch (...) {
    return nullptr;
  }
}

HWK_API void hwk_destroy(hwk_context* context) { delete context; }

HWK_API int hwk_gemm(hwk_context* context, const float* x, int64_t rows, int64_t in, int64_t ldx, const float* w,
                     int64_t out, const float* bias, float* y) {
  Gemm args{x, w, bias, y, rows, in, out, ldx};
  int64_t row_blocks = (rows + kRowBlock - 1) / kRowBlock;
  int64_t panels = (out + kPanel - 1) / kPanel;
  spread(context, args, context->level.gemm, panels * row_blocks, in * kPanel);
  return kDone;
}

HWK_API int hwk_embed(hwk_context* context, const float* w, int64_t out, int64_t in, const int64_t* ids, int64_t rows,
                      float* y) {
  if (!all_below(ids, rows, out)) return kOutOfRange;
  spread(context, Embed{w, ids, y, rows, in, out}, context->level.embed, rows, in * 16);
  return kDone;
}

HWK_API int hwk_rms_norm(hwk_context* context, const float* x, int64_t outer, int64_t inner, int64_t n, int64_t ldx,
                         const float* weight, float eps, float* y) {
  spread(context, RmsNorm{x, weight, y, outer, inner, n, ldx, eps}, context->level.rms_norm, outer * inner, n);
  return kDone;
}

HWK_API int hwk_rope(hwk_context* context, float* q, int64_t ldq, int64_t q_heads, float* k, int64_t ldk,
                     int64_t k_heads, int64_t dim, const int64_t* positions, int64_t rows, const float* cos,
                     const float* sin, int64_t length) {
  if (!all_below(positions, rows, length)) return kOutOfRange;
  Rope args{q, k, positions, cos, sin, rows, q_heads, k_heads, dim, ldq, ldk};
  spread(context, args, context->level.rope, rows, (q_heads + k_heads) * dim);
  return kDone;
}

HWK_API int hwk_write_kv(hwk_context* context, const float* k, int64_t ldk, const float* v, int64_t ldv, int64_t rows,
                         int64_t width, float* cells, int64_t num_cells, const int64_t* slots) {
  if (!all_below(slots, rows, num_cells)) return kOutOfRange;
  WriteKv args{k, v, cells, slots, rows, width, num_cells, ldk, ldv};
  spread(context, args, context->level.write_kv, rows, 2 * width);
  return kDone;
}

HWK_API int hwk_silu_mul(hwk_context* context, const float* x, int64_t rows, int64_t inner, int64_t ldx, float* y) {
  spread(context, SiluMul{x, y, rows, inner, ldx}, context->level.silu_mul, rows, 8 * inner);
  return kDone;
}

HWK_API int hwk_attention(hwk_context* context, const float* q, int64_t ldq, int64_t rows, int64_t heads,
                          int64_t kv_heads, int64_t dim, const float* kv, int64_t num_blocks, int64_t block_size,
                          const int32_t* tables, int64_t num_tables, int64_t table_width, const int32_t* row_of,
                          const int64_t* positions, float scale, float* y) {
  if (rows == 0) return kDone;
  std::lock_guard<std::mutex> lock(context->mutex);
  Attention args{q,    kv,    tables,   row_of, positions, nullptr,    y,          rows,
                 heads, kv_heads, dim, ldq, num_blocks, block_size, table_width, scale};
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

// exp of n floats, for the accuracy test.
HWK_API int hwk_exp(hwk_context* context, const float* x, int64_t n, float* y) {
  context->level.exp(x, y, n);
  return kDone;
}
