// Threads, level and scratch of one owner, and the ways a call is split over the threads. Included by every file of the
// C interface; level.h says why the files of the levels must not include it.
#pragma once

#include <atomic>
#include <cstdint>
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
  std::vector<uint8_t> records;  // quantized inputs
};

#define HWK_API extern "C" __attribute__((visibility("default")))

namespace hwk {

constexpr int kDone = 0, kOutOfRange = 1, kWrongMatrix = 2;
constexpr int64_t kWorthThreads = 32 * 1024;  // floats touched; below it, waking a worker costs more than it saves

inline bool all_below(const int64_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) return false;
  return true;
}

// Whole cache lines from somewhere in `buffer`, which grows as needed.
inline void* aligned(std::vector<uint8_t>& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) < bytes + 64) buffer.resize(static_cast<size_t>(bytes) + 64);
  auto address = reinterpret_cast<uintptr_t>(buffer.data());
  return buffer.data() + ((address + 63) / 64 * 64 - address);
}

inline bool worth_threads(int64_t parts, int64_t floats_per_part) {
  return parts > 1 && parts * floats_per_part >= kWorthThreads;
}

// An even, fixed split of `parts` over the threads; the caller holds the mutex.
template <class Args>
void share(hwk_context* context, const Args& args, void (*kernel)(const Args&, int64_t, int64_t), int64_t parts,
           int64_t floats_per_part) {
  if (!worth_threads(parts, floats_per_part)) return kernel(args, 0, parts);
  struct Call {
    const Args& args;
    void (*kernel)(const Args&, int64_t, int64_t);
    int64_t parts;
  } call{args, kernel, parts};
  context->pool.run(
      [](void* argument, int part, int count) {
        auto& c = *static_cast<Call*>(argument);
        c.kernel(c.args, c.parts * part / count, c.parts * (part + 1) / count);
      },
      &call);
}

// The same for kernels that need nothing of the context but threads.
template <class Args>
void spread(hwk_context* context, const Args& args, void (*kernel)(const Args&, int64_t, int64_t), int64_t parts,
            int64_t floats_per_part) {
  if (!worth_threads(parts, floats_per_part)) return kernel(args, 0, parts);
  std::lock_guard<std::mutex> lock(context->mutex);
  share(context, args, kernel, parts, floats_per_part);
}

}  // namespace hwk
