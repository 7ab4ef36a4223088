// Sixteen lanes of four weights 0..15 each, portable: what the 4-bit format is made of.
#pragma once

#include "bytes_generic.h"

namespace {

// What fits the registers.
constexpr int kNibbleRows = 2;
constexpr int kNibbleColumns = 1;
constexpr bool kNibbleStreams = false;  // whether several panels are read together for few rows

inline V from_integers(V bits) {  // lanes of int32
  I whole;
  memcpy(&whole, &bits, sizeof whole);
  return to_floats(whole);
}

// Four bits of each lane of four bytes, from the bit `Shift` on, as floats.
template <int Shift>
inline V nibble(const uint8_t* p) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(p[4 * i + Shift / 8] >> Shift % 8 & 15);
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

// Sixteen sums of at most 32 products; times(d, sum, shift_of(d)) is d * float(sum) rounded once, and zero is +0.
using SmallSum = I;
inline SmallSum no_sum() { return set_each(0); }
inline V shift_of(V) { return zero(); }
inline V times(V d, SmallSum sum, V shift) { return fma(d, to_floats(sum), shift); }
inline SmallSum small_dot(SmallSum sum, const Small& w, Inputs x) { return dot(sum, w, x); }

}  // namespace
