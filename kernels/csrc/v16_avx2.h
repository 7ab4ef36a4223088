// Sixteen float lanes as two AVX2 registers. Bit for bit the same results as v16_avx512.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

struct V {
  __m256 lo, hi;
};

// What fits the registers.
constexpr int kMaxRows = 6;
constexpr int columns_for(int rows) { return rows <= 2 ? 3 : rows == 3 ? 2 : 1; }
constexpr int kFewRows = 1;  // up to which several panels are read together
constexpr int streams_for(int) { return 2; }
constexpr int kHeadsTogether = 2;  // query heads that share a pass over the keys
constexpr int kKeysTogether = 2;   // keys that are multiplied together: 1, 2 or 4
constexpr int kMixColumns = 2;     // vectors of a value that are mixed together

inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline __m256i below(int n) {  // lanes with index < n
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline V load_n(const float* p, int n) {  // lanes from n on are zero and their memory is not read
  return {_mm256_maskload_ps(p, below(n)), _mm256_maskload_ps(p + 8, below(n - 8))};
}
inline void store_n(float* p, V v, int n) {
  _mm256_maskstore_ps(p, below(n), v.lo);
  _mm256_maskstore_ps(p + 8, below(n - 8), v.hi);
}

inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline __m256 pow2_half(__m256 n) {
  __m256i biased = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline V pow2(V n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }  // n: whole numbers in [-126, 127]
inline V unless_below(V x, V limit, V p) {  // p where x is not below the limit, else zero
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ), p.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ), p.hi)};
}
inline V scale2(V p, V n) {  // p * 2^n, rounded once; n: whole numbers in [-250, 250], p about 1
  V half = sub(add(mul(n, set1(0.5f)), set1(12582912.0f)), set1(12582912.0f));  // rounded to a whole number
  return mul(mul(p, pow2(half)), pow2(sub(n, half)));
}
inline void keep(V& v) { asm("" : "+x"(v.lo), "+x"(v.hi)); }  // in registers: or every use of a loaded vector loads it

// Sixteen halves or signed bytes at any address as floats, and floats as halves, rounded to nearest even.
inline V load_half(const uint8_t* p) {
  const auto* half = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}
inline V load_half_n(const uint8_t* p, int n) {
  uint8_t copy[32] = {};
  __builtin_memcpy(copy, p, 2 * static_cast<size_t>(n));
  return load_half(copy);
}
inline V load_byte(const uint8_t* p) {
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
}
inline V load_byte_n(const uint8_t* p, int n) {
  uint8_t copy[16] = {};
  __builtin_memcpy(copy, p, static_cast<size_t>(n));
  return load_byte(copy);
}
inline void store_half_n(uint8_t* p, V v, int n) {
  __m128i both[2] = {_mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT),
                     _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT)};
  __builtin_memcpy(p, both, 2 * static_cast<size_t>(n));
}

struct Halves {  // two bfloat16 in each lane
  __m256i lo, hi;
};
inline Halves load_halves(const void* p) {
  const auto* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline V lower(Halves h) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(h.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(h.hi, 16))};
}
inline V upper(Halves h) {
  __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(h.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(h.hi, mask))};
}

// Lanes are always combined at distance 8, then 4, 2, 1.
inline float sum(V v) {
  __m256 eight = _mm256_add_ps(v.lo, v.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(V v) {
  __m256 eight = _mm256_max_ps(v.lo, v.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline __m256 fold4(__m256 a, __m256 b) {  // [a0+a4.. | b0+b4..]
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline __m256 fold2(__m256 a, __m256 b) {
  __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}
inline __m256 fold1(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
}
// The transposing sum of sixteen vectors in two stages: quarter(v0, v4, v8, v12) folds four of them into one, and
// sums(quarters of v0.., v1.., v2.., v3..) has in lane i what sum(v[i]) would give.
inline V quarter(const V* v) {
  __m256 f[4];
  for (int i = 0; i < 4; ++i) f[i] = _mm256_add_ps(v[i].lo, v[i].hi);
  return {fold4(f[0], f[1]), fold4(f[2], f[3])};
}
inline V sums(const V* q) {
  return {fold1(fold2(q[0].lo, q[1].lo), fold2(q[2].lo, q[3].lo)),
          fold1(fold2(q[0].hi, q[1].hi), fold2(q[2].hi, q[3].hi))};
}

}  // namespace
