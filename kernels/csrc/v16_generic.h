// Sixteen float lanes as four portable vectors: what the kernels compute with where no wider unit is known.
// Compiled for a CPU without fused multiply-add (any x86-64), fma() rounds twice and bits differ from the wider levels.
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

struct V {
  F4 part[4];
};

// What fits the registers.
constexpr int kMaxRows = 3;
constexpr int columns_for(int rows) { return rows == 1 ? 3 : 1; }
constexpr int kFewRows = 0;  // up to which several panels are read together
constexpr int streams_for(int) { return 0; }
constexpr int kHeadsTogether = 1;  // query heads that share a pass over the keys
constexpr int kKeysTogether = 1;   // keys that are multiplied together: 1, 2 or 4
constexpr int kMixColumns = 1;     // vectors of a value that are mixed together

template <class F>
inline __attribute__((always_inline)) V each(F f) {
  return V{{f(0), f(1), f(2), f(3)}};
}

inline V set1(float x) {
  return each([&](int) { return F4{x, x, x, x}; });
}
inline V zero() { return set1(0.0f); }
inline V load(const float* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline V load_n(const float* p, int n) {  // lanes from n on are zero and their memory is not read
  V v = zero();
  memcpy(&v, p, static_cast<size_t>(n) * sizeof(float));
  return v;
}
inline void store(float* p, V v) { memcpy(p, &v, sizeof v); }
inline void store_n(float* p, V v, int n) { memcpy(p, &v, static_cast<size_t>(n) * sizeof(float)); }

inline V add(V a, V b) {
  return each([&](int i) { return a.part[i] + b.part[i]; });
}
inline V sub(V a, V b) {
  return each([&](int i) { return a.part[i] - b.part[i]; });
}
inline V mul(V a, V b) {
  return each([&](int i) { return a.part[i] * b.part[i]; });
}
inline V div(V a, V b) {
  return each([&](int i) { return a.part[i] / b.part[i]; });
}
inline V fma(V a, V b, V c) {
#if defined(__FP_FAST_FMAF)
  return each([&](int i) {
    F4 x = a.part[i], y = b.part[i], z = c.part[i];
    return F4{__builtin_fmaf(x[0], y[0], z[0]), __builtin_fmaf(x[1], y[1], z[1]), __builtin_fmaf(x[2], y[2], z[2]),
              __builtin_fmaf(x[3], y[3], z[3])};
  });
#else
  return each([&](int i) { return a.part[i] * b.part[i] + c.part[i]; });
#endif
}
// b where either is not a number, as the x86 instructions do it.
inline V max(V a, V b) {
  return each([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
inline V min(V a, V b) {
  return each([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
inline V pow2(V n) {  // n: whole numbers in [-126, 127]; anything when n is not a number
  return each([&](int i) {
    I4 whole = __builtin_convertvector(n.part[i], I4);
    return (F4)((whole + 127) << 23);
  });
}
inline V scale2(V p, V n) {  // p * 2^n, rounded once; n: whole numbers in [-250, 250], p about 1
  V half = sub(add(mul(n, set1(0.5f)), set1(12582912.0f)), set1(12582912.0f));  // rounded to a whole number
  return mul(mul(p, pow2(half)), pow2(sub(n, half)));
}
inline V unless_below(V x, V limit, V p) {  // p where x is not below the limit, else zero
  return each([&](int i) { return x.part[i] < limit.part[i] ? F4{} : p.part[i]; });
}
inline void keep(V&) {}

// Sixteen halves or signed bytes at any address as floats, and floats as halves, rounded to nearest even.
inline uint16_t to_half(float value) {
  uint32_t bits, rest, result;
  memcpy(&bits, &value, 4);
  rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) {
    result = 0x7e00;
  } else if (rest >= 0x477ff000) {  // 65520 and more round to infinity
    result = 0x7c00;
  } else if (rest < 0x38800000) {  // subnormal: the unit in the last place of 0.5 + x is that of the half
    memcpy(&value, &rest, 4);
    value += 0.5f;
    memcpy(&result, &value, 4);
    result -= 0x3f000000;
  } else {
    result = (rest - (112u << 23) + 0x0fff + ((rest >> 13) & 1)) >> 13;
  }
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | result);
}
inline V load_half_n(const uint8_t* p, int n) {
  uint16_t halves[16] = {};
  memcpy(halves, p, 2 * static_cast<size_t>(n));
  return each([&](int i) {
    I4 half = {halves[4 * i], halves[4 * i + 1], halves[4 * i + 2], halves[4 * i + 3]};
    I4 sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    I4 normal = (rest << 13) + (112 << 23);  // another exponent bias
    I4 small = (I4)(__builtin_convertvector(rest, F4) * 0x1p-24f);
    I4 special = (rest << 13) | 0x7f800000;
    return (F4)((rest < 0x0400 ? small : rest < 0x7c00 ? normal : special) | sign);
  });
}
inline V load_half(const uint8_t* p) { return load_half_n(p, 16); }
inline V load_byte_n(const uint8_t* p, int n) {
  int8_t bytes[16] = {};
  memcpy(bytes, p, static_cast<size_t>(n));
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = bytes[i];
  return load(lanes);
}
inline V load_byte(const uint8_t* p) { return load_byte_n(p, 16); }
inline void store_half_n(uint8_t* p, V v, int n) {
  float lanes[16];
  uint16_t halves[16];
  store(lanes, v);
  for (int i = 0; i < 16; ++i) halves[i] = to_half(lanes[i]);
  memcpy(p, halves, 2 * static_cast<size_t>(n));
}

struct Halves {  // two bfloat16 in each lane
  uint32_t lane[16];
};
inline Halves load_halves(const void* p) {
  Halves h;
  memcpy(&h, p, sizeof h);
  return h;
}
inline V from_bits(const uint32_t* bits) {
  V v;
  memcpy(&v, bits, sizeof v);
  return v;
}
inline V lower(Halves h) {
  for (uint32_t& lane : h.lane) lane <<= 16;
  return from_bits(h.lane);
}
inline V upper(Halves h) {
  for (uint32_t& lane : h.lane) lane &= 0xFFFF0000u;
  return from_bits(h.lane);
}

// Lanes are always combined at distance 8, then 4, 2, 1.
inline float sum(V v) {
  F4 four = (v.part[0] + v.part[2]) + (v.part[1] + v.part[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float largest(V v) {
  V a = max(v, V{{v.part[2], v.part[3], v.part[0], v.part[1]}});
  V b = max(a, V{{a.part[1], a.part[0], a.part[3], a.part[2]}});
  float x = b.part[0][0] > b.part[0][2] ? b.part[0][0] : b.part[0][2];
  float y = b.part[0][1] > b.part[0][3] ? b.part[0][1] : b.part[0][3];
  return x > y ? x : y;
}
// The transposing sum of sixteen vectors in two stages: quarter(v0, v4, v8, v12) keeps four partial lanes of each, and
// sums(quarters of v0.., v1.., v2.., v3..) has in lane i what sum(v[i]) would give.
inline V quarter(const V* v) {
  return each([&](int i) { return (v[i].part[0] + v[i].part[2]) + (v[i].part[1] + v[i].part[3]); });
}
inline V sums(const V* q) {
  return each([&](int i) {
    F4 lanes;
    for (int j = 0; j < 4; ++j) {
      F4 four = q[j].part[i];
      lanes[j] = (four[0] + four[2]) + (four[1] + four[3]);
    }
    return lanes;
  });
}

}  // namespace
