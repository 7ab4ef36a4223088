// Sixteen lanes of four small integers each, in AVX-512 registers: what the quantized formats are made of.
#pragma once

#include "ahead.h"
#include "v16_avx512.h"

namespace {

// What fits the registers.
#if defined(__AVX512VNNI__)
constexpr int kByteRows = 8;
constexpr int kStreamedByteRows = 8;  // up to which several panels are read together
#else
constexpr int kByteRows = 4;
constexpr int kStreamedByteRows = kFewRows;
#endif
constexpr int byte_columns_for(int) { return 3; }

// The largest |x| of n vectors; not a number if one of them is not.
inline float largest_size(const V* v, int n) {
  // The bits of sizes order as the sizes do, those that are not a number above all.
  __m512i size = _mm512_set1_epi32(0x7FFFFFFF), best = _mm512_setzero_si512();
  for (int i = 0; i < n; ++i) best = _mm512_max_epi32(best, _mm512_and_si512(_mm512_castps_si512(v[i].all), size));
  return _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epi32(best))));
}

struct I {  // sixteen sums
  __m512i all;
};
inline I set_each(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline V to_floats(I v) { return {_mm512_cvtepi32_ps(v.all)}; }

inline int32_t total(I v) { return _mm512_reduce_add_epi32(v.all); }

// Stores the lanes, all within [-127.5, 127.5], rounded half to even; adds them to the sums.
inline I to_bytes(int8_t* p, V v, I sum) {
  __m512i whole = _mm512_cvtps_epi32(v.all);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole));
  return {_mm512_add_epi32(sum.all, whole)};
}

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
// Four rows `stride` bytes apart times three vectors, in one piece: the compiler would keep eight row addresses in
// vector registers and on the stack. `thrice` is 3 * stride.
constexpr bool kHasQuad = true;
#define HWK_ROW(at, a, b, c)                                                                        \
  "vpbroadcastd " at ", %%zmm31\n\tvpdpbusd %%zmm31, %[w0], %[" a "]\n\tvpdpbusd %%zmm31, %[w1], %[" b \
  "]\n\tvpdpbusd %%zmm31, %[w2], %[" c "]\n\t"
inline __attribute__((always_inline)) void quad(I (*sum)[3], const Weights* w, const int8_t* x, int64_t stride,
                                                int64_t thrice) {
  __asm__(HWK_ROW("(%[x])", "a0", "b0", "c0") HWK_ROW("(%[x],%[s])", "a1", "b1", "c1")
          HWK_ROW("(%[x],%[s],2)", "a2", "b2", "c2") HWK_ROW("(%[x],%[t])", "a3", "b3", "c3")
          : [a0] "+v"(sum[0][0].all), [b0] "+v"(sum[0][1].all), [c0] "+v"(sum[0][2].all), [a1] "+v"(sum[1][0].all),
            [b1] "+v"(sum[1][1].all), [c1] "+v"(sum[1][2].all), [a2] "+v"(sum[2][0].all), [b2] "+v"(sum[2][1].all),
            [c2] "+v"(sum[2][2].all), [a3] "+v"(sum[3][0].all), [b3] "+v"(sum[3][1].all), [c3] "+v"(sum[3][2].all)
          : [w0] "v"(w[0].all), [w1] "v"(w[1].all), [w2] "v"(w[2].all), [x] "r"(x), [s] "r"(stride), [t] "r"(thrice)
          : "zmm31", "memory");
}
#undef HWK_ROW
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
constexpr bool kHasQuad = false;
inline I dot(I sum, Weights w, Inputs x) {
  __m512i even = _mm512_madd_epi16(w.even, x.even), odd = _mm512_madd_epi16(w.odd, x.odd);
  return {_mm512_add_epi32(sum.all, _mm512_add_epi32(even, odd))};
}
#endif

}  // namespace
