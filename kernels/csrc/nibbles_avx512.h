// Sixteen lanes of four weights 0..15 each, in AVX-512 registers: what the 4-bit format is made of.
#pragma once

#include "bytes_avx512.h"

namespace {

// What fits the registers.
constexpr int kNibbleRows = 4;
constexpr int kNibbleColumns = 3;
constexpr bool kNibbleStreams = true;  // whether several panels are read together for few rows

inline V from_integers(V bits) { return {_mm512_cvtepi32_ps(_mm512_castps_si512(bits.all))}; }  // lanes of int32

// Four bits of each lane of four bytes, from the bit `Shift` on, as floats.
template <int Shift>
inline V nibble(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_and_si512(_mm512_srli_epi32(_mm512_loadu_si512(p), Shift), _mm512_set1_epi32(15)))};
}

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

// Sixteen sums of at most 32 products; times(d, sum, shift_of(d)) is d * float(sum) rounded once, and zero is +0.
struct SmallSum {
  __m512i all;
};
#if defined(__AVX512VNNI__)
// Sums begin at the bits of 1.5 * 2^23 and so are, read as floats, that much above themselves. d has few bits: taking
// d * 1.5 * 2^23, which is exact, away in a fused step saves the conversion.
constexpr int32_t kSumBits = 0x4B400000;
inline SmallSum no_sum() { return {_mm512_set1_epi32(kSumBits)}; }
inline V shift_of(V d) { return mul(d, set1(-12582912.0f)); }
inline V times(V d, SmallSum sum, V shift) { return fma(d, V{_mm512_castsi512_ps(sum.all)}, shift); }
inline __attribute__((always_inline)) SmallSum small_dot(SmallSum sum, Small w, __m512i x) {
  // Not the intrinsic: see dot in bytes_avx512.h.
  __m512i total = sum.all;
  __asm__("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(w.all), "v"(x));
  return {total};
}
#else
// Two products are at most 15 * 127 * 2, and eight such pairs still fit 16 bits.
inline SmallSum no_sum() { return {_mm512_setzero_si512()}; }
inline V shift_of(V) { return zero(); }
inline V times(V d, SmallSum sum, V shift) {
  return fma(d, V{_mm512_cvtepi32_ps(_mm512_madd_epi16(sum.all, _mm512_set1_epi16(1)))}, shift);
}
inline SmallSum small_dot(SmallSum sum, Small w, __m512i x) {
  return {_mm512_add_epi16(sum.all, _mm512_maddubs_epi16(w.all, x))};
}
#endif

}  // namespace
