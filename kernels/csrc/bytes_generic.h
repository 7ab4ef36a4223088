// Sixteen lanes of four small integers each, portable: the sums of products that the quantized formats are made of.
#pragma once

#include "v16_generic.h"

namespace {

// The largest |x| of n vectors; not a number if one of them is not.
inline float largest_size(const V* v, int n) {
  int32_t best = 0;  // the bits of sizes order as the sizes do, those that are not a number above all
  for (int i = 0; i < n; ++i) {
    int32_t bits[16];
    memcpy(bits, &v[i], sizeof bits);
    for (int32_t x : bits) best = (x & 0x7FFFFFFF) > best ? x & 0x7FFFFFFF : best;
  }
  float size;
  memcpy(&size, &best, sizeof size);
  return size;
}

// Stores the lanes, all within [-127.5, 127.5], rounded half to even; returns their sum.
inline int32_t to_bytes(int8_t* p, V v) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to a whole number
  float lanes[16];
  store(lanes, sub(add(v, set1(kRound)), set1(kRound)));
  int32_t total = 0;
  for (int i = 0; i < 16; ++i) {
    p[i] = static_cast<int8_t>(lanes[i]);
    total += p[i];
  }
  return total;
}

}  // namespace
