// Which numbers of adapters the rows of a step read after a product, so that they are asked for while it is computed: in
// a step of few rows a product waits for memory less than what comes after it. Used by step.cpp.
#pragma once

#include "decoder.h"

namespace hwk {

constexpr int64_t kMostComing = 512 << 10;  // bytes for a thread: more would push out what comes first

// Adds a thread's share of one part to `coming`; every other extent is another thread's.
class Coming {
 public:
  Coming(std::vector<Extent>& extents, int thread, int threads) : extents_(extents), thread_(thread), threads_(threads) {
    extents_.clear();
  }

  void add(const AdaptedPart& part, int64_t in, int64_t out) {
    if (part.rank == 0) return;
    const int64_t size = part.format == kKvF32 ? 4 : part.format == kKvF16 ? 2 : 1;
    add(part.shrink, padded(in) * part.rank * size);
    add(part.expand, padded(out) * part.rank * size);
  }

  // For a product whose kernel asks about `times` times.
  Beside beside(int64_t times) const {
    const Extent* first = extents_.data();
    const int64_t lines = bytes_ > kMostComing || times <= 0 ? 0 : (bytes_ / 64 + times - 1) / times;
    return Beside{first, first + extents_.size(), Extent{nullptr, nullptr}, lines};
  }

 private:
  void add(const void* begin, int64_t bytes) {
    if (count_++ % threads_ != thread_) return;
    const char* at = static_cast<const char*>(begin);
    extents_.push_back(Extent{at, at + bytes});
    bytes_ += bytes;
  }

  std::vector<Extent>& extents_;
  const int thread_, threads_;
  int64_t count_ = 0, bytes_ = 0;
};

}  // namespace hwk
