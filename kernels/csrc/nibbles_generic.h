// Sixteen lanes of four weights 0..15 each, portable: what the 4-bit format is made of.
#pragma once

#include "bytes_generic.h"

namespace {

// What fits the registers.
constexpr int kNibbleRows = 2;
constexpr int kNibbleColumns = 1;

inline V whole_numbers(const int32_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(p[i]);
  return load(lanes);
}

using Small = Weights;  // sixteen times four bytes 0..15
inline Small small(const uint8_t* p) { return weights(p); }
inline Small low_nibbles(const uint8_t* p) {
  Small w = small(p);
  for (uint8_t& byte : w.byte) byte &= 15;
  return w;
}
inline Small high_nibbles(const uint8_t* p) {
  Small w = small(p);
  for (uint8_t& byte : w.byte) byte >>= 4;
  return w;
}
inline void store_small(uint8_t* p, const Small& w) { memcpy(p, &w, sizeof w); }

inline Inputs four_inputs(const int8_t* p) { return inputs(p); }  // -127..127

using SmallSum = I;  // sixteen sums of at most 32 products
inline SmallSum no_sum() { return set_each(0); }
inline SmallSum small_dot(SmallSum sum, const Small& w, Inputs x) { return dot(sum, w, x); }

}  // namespace
