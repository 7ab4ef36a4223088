// Sixteen lanes of four weights 0..15 each, portable: what the 4-bit format is made of.
#pragma once

#include "bytes_generic.h"

namespace {

// What fits the registers.
constexpr int kNibbleRows = 2;
constexpr int kNibbleColumns = 1;

inline float half_to_float(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7FFFu;
  if (rest < 0x400) {  // zero or below the normal numbers: a multiple of 2^-24
    float size = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -size : size;
  }
  uint32_t bits = sign | (rest << 13) | (rest >= 0x7C00 ? 0x7F800000u : 0u);
  if (rest < 0x7C00) bits += (127u - 15u) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline V halves(const uint8_t* p) {  // sixteen float16
  uint16_t half[16];
  float lanes[16];
  memcpy(half, p, sizeof half);
  for (int i = 0; i < 16; ++i) lanes[i] = half_to_float(half[i]);
  return load(lanes);
}
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
