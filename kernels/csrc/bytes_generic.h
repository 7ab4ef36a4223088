// Sixteen lanes of four small integers each, portable: the sums of products that the quantized formats are made of.
#pragma once

#include "ahead.h"
#include "v16_generic.h"

namespace {

// What fits the registers.
constexpr int kByteRows = 2;
constexpr bool kHasQuad = false;
constexpr int kStreamedByteRows = kFewRows;  // up to which several panels are read together
constexpr int byte_columns_for(int) { return 1; }

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

struct I {  // sixteen sums
  int32_t lane[16];
};
inline I set_each(int32_t x) {
  I v;
  for (int32_t& lane : v.lane) lane = x;
  return v;
}
inline V to_floats(I v) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(v.lane[i]);
  return load(lanes);
}

inline int32_t total(I v) {
  int32_t all = 0;
  for (int32_t lane : v.lane) all += lane;
  return all;
}

// Stores the lanes, all within [-127.5, 127.5], rounded half to even; adds them to the sums.
inline I to_bytes(int8_t* p, V v, I sum) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and taking it away rounds to a whole number
  float lanes[16];
  store(lanes, sub(add(v, set1(kRound)), set1(kRound)));
  for (int i = 0; i < 16; ++i) {
    p[i] = static_cast<int8_t>(lanes[i]);
    sum.lane[i] += p[i];
  }
  return sum;
}

// Weights are sixteen times four bytes 0..255, inputs the same four bytes -128..127 in every lane; dot adds the four
// products of each lane to its sum, exactly.
struct Weights {
  uint8_t byte[64];
};
struct Inputs {
  int8_t byte[4];
};
inline Weights weights(const uint8_t* p) {
  Weights w;
  memcpy(&w, p, sizeof w);
  return w;
}
inline Inputs inputs(const int8_t* p) {
  Inputs x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline I dot(I sum, const Weights& w, Inputs x) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) sum.lane[i] += w.byte[4 * i + j] * x.byte[j];
  return sum;
}

}  // namespace
