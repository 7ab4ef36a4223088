// Threads, level and scratch of one owner, and the ways a call is split over the threads. Included by every file of the
// C interface; level.h says why the files of the levels must not include it.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "level.h"
#include "pool.h"

// Calls on a context are serialized by `mutex`.
struct hwk_context {
  hwk_context(int threads, const hwk::Level& chosen) : pool(threads), level(chosen), scratch(threads) {}
  hwk::Pool pool;
  const hwk::Level& level;
  std::mutex mutex;
  std::vector<std::vector<float>> scratch;  // one per thread
  std::vector<hwk::QueryBlock> blocks;
};

#define HWK_API extern "C" __attribute__((visibility("default")))

namespace hwk {

constexpr int kDone = 0, kOutOfRange = 1;
constexpr int64_t kWorthThreads = 32 * 1024;  // floats touched; below it, waking a worker costs more than it saves

inline bool all_below(const int64_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) return false;
  return true;
}

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

}  // namespace hwk
