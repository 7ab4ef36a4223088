// Sixteen lanes of four small integers each, in AVX-512 registers: what the quantized formats are made of.
#pragma once

#include "v16_avx512.h"

namespace {

// What fits the registers.
constexpr int kByteRows = 8;
constexpr int byte_columns_for(int) { return 3; }

// The largest |x| of n vectors; not a number if one of them is not.
inline float largest_size(const V* v, int n) {
  // The bits of sizes order as the sizes do, those that are not a number above all.
  __m512i size = _mm512_set1_epi32(0x7FFFFFFF), best = _mm512_setzero_si512();
  for (int i = 0; i < n; ++i) best = _mm512_max_epi32(best, _mm512_and_si512(_mm512_castps_si512(v[i].all), size));
  return _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epi32(best))));
}

// Stores the lanes, all within [-127.5, 127.5], rounded half to even; returns their sum.
inline int32_t to_bytes(int8_t* p, V v) {
  __m512i whole = _mm512_cvtps_epi32(v.all);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}

struct I {  // sixteen sums
  __m512i all;
};
inline I set_each(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline V to_floats(I v) { return {_mm512_cvtepi32_ps(v.all)}; }

// Weights are sixteen times four bytes 0..255, inputs the same four bytes -128..127 in every lane; dot adds the four
// products of each lane to its sum, exactly.
#if defined(__AVX512VNNI__)
struct Weights {
  __m512i all;
};
using Inputs = Weights;
inline Weights weights(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Inputs inputs(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return {_mm512_set1_epi32(four)};
}
inline __attribute__((always_inline)) I dot(I sum, Weights w, Inputs x) {
  // Not the intrinsic: around it GCC 12 moves the sums between registers and the stack, which takes two thirds of the
  // speed.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.all) : "v"(w.all), "v"(x.all));
  return sum;
}
#else
struct Weights {  // bytes 0 and 2 of each lane, and 1 and 3, as 16-bit integers: their products cannot saturate
  __m512i even, odd;
};
using Inputs = Weights;
inline Weights weights(const uint8_t* p) {
  __m512i bytes = _mm512_loadu_si512(p);
  return {_mm512_and_si512(bytes, _mm512_set1_epi16(0xFF)), _mm512_srli_epi16(bytes, 8)};
}
inline Inputs inputs(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  __m512i bytes = _mm512_set1_epi32(four);
  return {_mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
}
inline I dot(I sum, Weights w, Inputs x) {
  __m512i even = _mm512_madd_epi16(w.even, x.even), odd = _mm512_madd_epi16(w.odd, x.odd);
  return {_mm512_add_epi32(sum.all, _mm512_add_epi32(even, odd))};
}
#endif

}  // namespace
