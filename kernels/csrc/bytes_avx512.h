// Sixteen lanes of four small integers each, in AVX-512 registers: what the quantized formats are made of.
#pragma once

#include "v16_avx512.h"

namespace {

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

}  // namespace
