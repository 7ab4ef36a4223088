// Sixteen lanes of four small integers each, in AVX2 registers: what the quantized formats are made of.
#pragma once

#include "ahead.h"
#include "v16_avx2.h"

namespace {

// What fits the registers.
constexpr int kByteRows = 2;
constexpr bool kHasQuad = false;
constexpr int kStreamedByteRows = kFewRows;  // up to which several panels are read together
constexpr int byte_columns_for(int) { return 3; }

// The largest |x| of n vectors; not a number if one of them is not.
inline float largest_size(const V* v, int n) {
  // The bits of sizes order as the sizes do, those that are not a number above all.
  __m256i size = _mm256_set1_epi32(0x7FFFFFFF), best = _mm256_setzero_si256();
  for (int i = 0; i < n; ++i) {
    best = _mm256_max_epi32(best, _mm256_and_si256(_mm256_castps_si256(v[i].lo), size));
    best = _mm256_max_epi32(best, _mm256_and_si256(_mm256_castps_si256(v[i].hi), size));
  }
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(best), _mm256_extracti128_si256(best, 1));
  __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1))));
}

struct I {  // sixteen sums
  __m256i lo, hi;
};
inline I set_each(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline V to_floats(I v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }

inline int32_t total(I v) {
  __m256i eight = _mm256_add_epi32(v.lo, v.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}

// Stores the lanes, all within [-127.5, 127.5], rounded half to even; adds them to the sums.
inline I to_bytes(int8_t* p, V v, I sum) {
  __m256i lo = _mm256_cvtps_epi32(v.lo), hi = _mm256_cvtps_epi32(v.hi);
  __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(lo), _mm256_extracti128_si256(lo, 1));
  __m128i second = _mm_packs_epi32(_mm256_castsi256_si128(hi), _mm256_extracti128_si256(hi, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(first, second));
  return {_mm256_add_epi32(sum.lo, lo), _mm256_add_epi32(sum.hi, hi)};
}

// Weights are sixteen times four bytes 0..255, inputs the same four bytes -128..127 in every lane; dot adds the four
// products of each lane to its sum, exactly: bytes 0 and 2 of a lane, and 1 and 3, are multiplied as 16-bit integers,
// since the instruction that multiplies bytes saturates.
struct Pair {
  __m256i even, odd;
};
struct Weights {
  Pair lo, hi;
};
using Inputs = Pair;
inline Pair unsigned_pair(const uint8_t* p) {
  __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)), _mm256_srli_epi16(bytes, 8)};
}
inline Weights weights(const uint8_t* p) { return {unsigned_pair(p), unsigned_pair(p + 32)}; }
inline Inputs inputs(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  __m256i bytes = _mm256_set1_epi32(four);
  return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}
inline __m256i dot_half(__m256i sum, Pair w, Pair x) {
  __m256i even = _mm256_madd_epi16(w.even, x.even), odd = _mm256_madd_epi16(w.odd, x.odd);
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
inline I dot(I sum, Weights w, Inputs x) { return {dot_half(sum.lo, w.lo, x), dot_half(sum.hi, w.hi, x)}; }

}  // namespace
