// Bringing weights from memory while earlier ones are multiplied. Used by the matrix kernels of every level.
//
// What a thread multiplies with is one run of adjacent panels. While it works on one segment of the run the next one is
// prefetched, evenly over that time and in four streams side by side: memory gives a third more to four streams than to
// one. Prefetching changes no result and never faults.
#pragma once

#include <stdint.h>

#include "level.h"

namespace {

// Invariant: what is prefetched lies in the segment after the one that is worked on, and before `end`.
class Ahead {
 public:
  // tiles: how often each weight is used.
  Ahead(const void* begin, const void* end, int64_t tiles)
      : next_(static_cast<const char*>(begin)), end_(static_cast<const char*>(end)), tiles_(tiles), line_(next_) {
    reach(next_);
  }

  // The work has come to this place.
  void reach(const void* place) {
    if (place < next_ || next_ >= end_) return;
    next_ += size_;
    size_ = size_ * 2 < kLargest ? size_ * 2 : kLargest;
    line_ = next_;
    quarter_ = ((end_ - next_ < size_ ? end_ - next_ : size_) / 4 + 63) / 64 * 64;
    left_ = next_ < end_ ? quarter_ / 64 : 0;
  }

  // What to fetch whenever a tile has used `lines` lines.
  int64_t share(int64_t lines) const { return (lines + 4 * tiles_ - 1) / (4 * tiles_); }

  // Four lines, so many times.
  inline __attribute__((always_inline)) void fetch(int64_t times) {
    if (times > left_) times = left_;
    left_ -= times;
    for (; times > 0; --times, line_ += 64)
      for (int i = 0; i < 4; ++i) __builtin_prefetch(line_ + i * quarter_, 0, 2);
  }

 private:
  // Nothing was prefetched before the first segment, so it is small. By measurement.
  static constexpr int64_t kFirst = 8 * 1024, kLargest = 64 * 1024;
  const char* next_;  // the first byte after the segment that is worked on
  const char* end_;
  int64_t size_ = kFirst;  // of that segment
  int64_t tiles_;
  const char* line_;  // the next one to prefetch in the first stream
  int64_t quarter_ = 0, left_ = 0;
};

// Some lines of what comes after the product, if anything does.
inline __attribute__((always_inline)) void ask(hwk::Beside* beside) {
  if (!beside) return;
  for (int64_t left = beside->lines; left > 0; --left, beside->now.at += 64) {
    if (beside->now.at >= beside->now.end) {
      if (beside->next == beside->last) {
        beside->lines = 0;
        return;
      }
      beside->now = *beside->next++;
    }
    __builtin_prefetch(beside->now.at, 0, 2);
  }
}

}  // namespace
