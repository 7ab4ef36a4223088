// Sixteen lanes of four small integers each, in AVX2 registers: what the quantized formats are made of.
#pragma once

#include "v16_avx2.h"

namespace {

inline int32_t sum_lanes(__m256i v) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}

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

// Stores the lanes, all within [-127.5, 127.5], rounded half to even; returns their sum.
inline int32_t to_bytes(int8_t* p, V v) {
  __m256i lo = _mm256_cvtps_epi32(v.lo), hi = _mm256_cvtps_epi32(v.hi);
  __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(lo), _mm256_extracti128_si256(lo, 1));
  __m128i second = _mm_packs_epi32(_mm256_castsi256_si128(hi), _mm256_extracti128_si256(hi, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(first, second));
  return sum_lanes(_mm256_add_epi32(lo, hi));
}

}  // namespace
