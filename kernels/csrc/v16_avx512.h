// Sixteen float lanes as one AVX-512 register. Bit for bit the same results as v16_avx2.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

struct V {
  __m512 all;
};

// What fits the registers.
constexpr int kMaxRows = 8;
constexpr int columns_for(int) { return 3; }
constexpr int kFewRows = 4;  // up to which several panels are read together
constexpr int streams_for(int rows) { return rows <= 2 ? 4 : 2; }
constexpr int kHeadsTogether = 6;  // query heads that share a pass over the keys
constexpr int kKeysTogether = 4;   // keys that are multiplied together: 1, 2 or 4
constexpr int kMixColumns = 4;     // vectors of a value that are mixed together

inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V zero() { return {_mm512_setzero_ps()}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v.all); }
inline __mmask16 below(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline V load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(below(n), p)}; }  // other lanes are zero
inline void store_n(float* p, V v, int n) { _mm512_mask_storeu_ps(p, below(n), v.all); }

inline V add(V a, V b) { return {_mm512_add_ps(a.all, b.all)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.all, b.all)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.all, b.all)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.all, b.all)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.all, b.all)}; }
inline V scale2(V p, V n) { return {_mm512_scalef_ps(p.all, n.all)}; }  // p * 2^n, rounded once; n: whole numbers
inline V unless_below(V x, V limit, V p) {  // p where x is not below the limit, else zero
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.all, limit.all, _CMP_NLT_UQ), p.all)};
}
inline void keep(V& v) { asm("" : "+v"(v.all)); }  // in a register: or every use of a loaded vector loads it again

// Sixteen halves or signed bytes at any address as floats, and floats as halves, rounded to nearest even.
inline V load_half(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline V load_half_n(const uint8_t* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(below(n), p))}; }
inline V load_byte(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline V load_byte_n(const uint8_t* p, int n) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(below(n), p)))};
}
inline void store_half_n(uint8_t* p, V v, int n) {
  _mm256_mask_storeu_epi16(p, below(n), _mm512_cvtps_ph(v.all, _MM_FROUND_TO_NEAREST_INT));
}

struct Halves {  // two bfloat16 in each lane
  __m512i all;
};
inline Halves load_halves(const void* p) { return {_mm512_loadu_si512(p)}; }
inline V lower(Halves h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(h.all, 16))}; }
inline V upper(Halves h) {
  return {_mm512_castsi512_ps(_mm512_and_si512(h.all, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000))))};
}

// Lanes are always combined at distance 8, then 4, 2, 1.
inline __m256 upper_half(__m512 v) { return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(v), 1)); }
inline float sum(V v) {
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.all), upper_half(v.all));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(V v) {
  __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v.all), upper_half(v.all));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline __m512 fold8(V a, V b) {  // [a0+a8.. | b0+b8..]
  return _mm512_add_ps(_mm512_shuffle_f32x4(a.all, b.all, 0x44), _mm512_shuffle_f32x4(a.all, b.all, 0xEE));
}
inline __m512 fold4(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
inline __m512 fold2(__m512 a, __m512 b) {
  __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
inline __m512 fold1(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}
// The transposing sum of sixteen vectors in two stages: quarter(v0, v4, v8, v12) folds four of them into one, and
// sums(quarters of v0.., v1.., v2.., v3..) has in lane i what sum(v[i]) would give.
inline V quarter(const V* v) { return {fold4(fold8(v[0], v[1]), fold8(v[2], v[3]))}; }
inline V sums(const V* q) { return {fold1(fold2(q[0].all, q[1].all), fold2(q[2].all, q[3].all))}; }

}  // namespace
