// Sixteen lanes of four weights 0..15 each, in AVX-512 registers: what the 4-bit format is made of.
#pragma once

#include "bytes_avx512.h"

namespace {

// What fits the registers.
constexpr int kNibbleRows = 4;
constexpr int kNibbleColumns = 3;

inline V whole_numbers(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }

struct Small {  // sixteen times four bytes 0..15
  __m512i all;
};
inline Small small(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Small low_nibbles(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15))};
}
inline Small high_nibbles(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15))};
}
inline void store_small(uint8_t* p, Small w) { _mm512_storeu_si512(p, w.all); }

// The same four inputs -127..127 in every lane.
inline __m512i four_inputs(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

struct SmallSum {  // sixteen sums of at most 32 products
  __m512i all;
};
inline SmallSum no_sum() { return {_mm512_setzero_si512()}; }
#if defined(__AVX512VNNI__)
inline __attribute__((always_inline)) SmallSum small_dot(SmallSum sum, Small w, __m512i x) {
  // Not the intrinsic: see dot in bytes_avx512.h.
  __m512i total = sum.all;
  __asm__("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(w.all), "v"(x));
  return {total};
}
inline V to_floats(SmallSum sum) { return {_mm512_cvtepi32_ps(sum.all)}; }
#else
// Two products are at most 15 * 127 * 2, and eight such pairs still fit 16 bits.
inline SmallSum small_dot(SmallSum sum, Small w, __m512i x) {
  return {_mm512_add_epi16(sum.all, _mm512_maddubs_epi16(w.all, x))};
}
inline V to_floats(SmallSum sum) {
  return {_mm512_cvtepi32_ps(_mm512_madd_epi16(sum.all, _mm512_set1_epi16(1)))};
}
#endif

}  // namespace
