// Sixteen lanes of four weights 0..15 each, in AVX2 registers: what the 4-bit format is made of.
#pragma once

#include "bytes_avx2.h"

namespace {

// What fits the registers.
constexpr int kNibbleRows = 2;
constexpr int kNibbleColumns = 1;
constexpr bool kNibbleStreams = false;  // whether several panels are read together for few rows

inline V from_integers(V bits) {  // lanes of int32
  return {_mm256_cvtepi32_ps(_mm256_castps_si256(bits.lo)), _mm256_cvtepi32_ps(_mm256_castps_si256(bits.hi))};
}

// Four bits of each lane of four bytes, from the bit `Shift` on, as floats.
template <int Shift>
inline V nibble(const uint8_t* p) {
  const auto* half = reinterpret_cast<const __m256i*>(p);
  __m256i mask = _mm256_set1_epi32(15);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256(half), Shift), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256(half + 1), Shift), mask))};
}

struct Small {  // sixteen times four bytes 0..15
  __m256i lo, hi;
};
inline Small small(const uint8_t* p) {
  const auto* half = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
}
inline Small low_nibbles(const uint8_t* p) {
  Small bytes = small(p);
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(bytes.lo, mask), _mm256_and_si256(bytes.hi, mask)};
}
inline Small high_nibbles(const uint8_t* p) {
  Small bytes = small(p);
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(bytes.lo, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(bytes.hi, 4), mask)};
}
inline void store_small(uint8_t* p, Small w) {
  auto* half = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(half, w.lo);
  _mm256_storeu_si256(half + 1, w.hi);
}

// The same four inputs -127..127 in every lane.
inline __m256i four_inputs(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}

// Sixteen sums of at most 32 products; times(d, sum, shift_of(d)) is d * float(sum) rounded once, and zero is +0.
// Two products are at most 15 * 127 * 2, and eight such pairs still fit 16 bits.
struct SmallSum {
  __m256i lo, hi;
};
inline SmallSum no_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline SmallSum small_dot(SmallSum sum, Small w, __m256i x) {
  return {_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, x)),
          _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, x))};
}
inline V shift_of(V) { return zero(); }
inline V times(V d, SmallSum sum, V shift) {
  __m256i one = _mm256_set1_epi16(1);
  __m256i lo = _mm256_madd_epi16(sum.lo, one), hi = _mm256_madd_epi16(sum.hi, one);
  return fma(d, V{_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}, shift);
}

}  // namespace
