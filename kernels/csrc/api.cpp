// The C interface: picks the level, checks every index before memory is touched with it, and splits calls over threads.
//
// Shapes, strides and contiguity are the caller's duty (headway.kernels.native checks them); values that arrive in
// tensors (tokens, positions, slots, block tables) are checked here. Status: 0 done, 1 an index is out of range, 2 a
// packed matrix is not what the call says.
#include "context.h"
#include "matrix.h"

#ifdef HWK_X86_LEVELS
#include <cpuid.h>
#endif

namespace {

using namespace hwk;

enum LevelId { kLevelGeneric = 0, kLevelAvx2 = 1, kLevelAvx512 = 2, kLevelAvx512Vnni = 3 };

#ifdef HWK_X86_LEVELS
// Not every clang knows the name f16c in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

int best_level() {
#ifdef HWK_X86_LEVELS
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return kLevelGeneric;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl"))
    return kLevelAvx2;
  return __builtin_cpu_supports("avx512vnni") ? kLevelAvx512Vnni : kLevelAvx512;
#else
  return kLevelGeneric;
#endif
}

const Level& level_of(int id) {
#ifdef HWK_X86_LEVELS
  if (id == kLevelAvx512Vnni) return kAvx512Vnni;
  if (id == kLevelAvx512) return kAvx512;
  if (id == kLevelAvx2) return kAvx2;
#endif
  (void)id;
  return kGeneric;
}

}  // namespace

HWK_API int hwk_abi() { return 8; }

HWK_API int hwk_best_level() { return best_level(); }

// Null when this machine cannot run the level, threads < 1, or a thread cannot be made.
HWK_API hwk_context* hwk_create(int threads, int level_id) {
  if (threads < 1 || level_id < 0 || level_id > best_level()) return nullptr;
  try {
    return new hwk_context(threads, level_of(level_id));
  } catch (...) {
    return nullptr;
  }
}

HWK_API void hwk_destroy(hwk_context* context) { delete context; }

// records: quant_bytes(format, in) bytes per row, 64-byte aligned. Here to be tested: hwk_gemm quantizes by itself.
HWK_API int hwk_quantize(hwk_context* context, const float* x, int64_t rows, int64_t in, int64_t ldx, int32_t format,
                         void* records) {
  spread(context, Quantize{x, records, rows, in, ldx, format}, context->level.quantize, rows, in);
  return kDone;
}

HWK_API int64_t hwk_quant_bytes(int32_t format, int64_t in) { return quant_bytes(format, in); }

HWK_API int hwk_gemm(hwk_context* context, const float* x, int64_t rows, int64_t in, int64_t ldx, const void* w,
                     int32_t format, int64_t w_bytes, int64_t out, const float* bias, float* y) {
  Gemm args{x, nullptr, Matrix{w, in, out, format}, bias, y, rows, ldx, out, nullptr};
  if (!is_matrix(args.w, w_bytes)) return kWrongMatrix;
  std::lock_guard<std::mutex> lock(context->mutex);
  if (quant_group(format)) {
    void* records = aligned(context->records, rows * quant_bytes(format, in));
    share(context, Quantize{x, records, rows, in, ldx, format}, context->level.quantize, rows, in);
    args.records = records;
  }
  share(context, args, context->level.gemm, gemm_parts(rows, out), in * kPanel);
  return kDone;
}

HWK_API int hwk_embed(hwk_context* context, const void* w, int32_t format, int64_t w_bytes, int64_t out, int64_t in,
                      const int64_t* ids, int64_t rows, float* y) {
  Embed args{Matrix{w, in, out, format}, ids, y, rows};
  if (!is_matrix(args.w, w_bytes)) return kWrongMatrix;
  if (!all_below(ids, rows, out)) return kOutOfRange;
  spread(context, args, context->level.embed, rows, in * 16);
  return kDone;
}

HWK_API int hwk_rms_norm(hwk_context* context, const float* x, int64_t outer, int64_t inner, int64_t n, int64_t ldx,
                         const float* weight, float eps, float* y) {
  spread(context, RmsNorm{x, weight, y, outer, inner, n, ldx, eps}, context->level.rms_norm, outer * inner, n);
  return kDone;
}

HWK_API int hwk_layer_norm(hwk_context* context, const float* x, int64_t rows, int64_t n, int64_t ldx,
                           const float* weight, const float* bias, float eps, float* y) {
  spread(context, LayerNorm{x, weight, bias, y, rows, n, ldx, eps}, context->level.layer_norm, rows, 2 * n);
  return kDone;
}

HWK_API int hwk_rope(hwk_context* context, float* q, int64_t ldq, int64_t q_heads, float* k, int64_t ldk,
                     int64_t k_heads, int64_t dim, int64_t turned, const int64_t* positions, int64_t rows, const float* cos,
                     const float* sin, int64_t length) {
  if (!all_below(positions, rows, length)) return kOutOfRange;
  Rope args{q, k, positions, cos, sin, rows, q_heads, k_heads, dim, turned, ldq, ldk};
  spread(context, args, context->level.rope, rows, (q_heads + k_heads) * dim);
  return kDone;
}

HWK_API int hwk_gate_mul(hwk_context* context, const float* x, int64_t rows, int64_t inner, int64_t ldx,
                         int32_t activation, float* y) {
  spread(context, GateMul{x, y, rows, inner, ldx, activation}, context->level.gate_mul, rows, 8 * inner);
  return kDone;
}

HWK_API int hwk_gelu(hwk_context* context, const float* x, int64_t n, float* y) {
  spread(context, Gelu{x, y}, context->level.gelu, n, 8);
  return kDone;
}

HWK_API int hwk_soft_cap(hwk_context* context, const float* x, int64_t n, float cap, float* y) {
  spread(context, SoftCap{x, y, cap}, context->level.soft_cap, n, 8);
  return kDone;
}

// shrink and expand as low_rank.inc lays them out, of `rank` numbers, a multiple of kRankBlock.
HWK_API int hwk_adapt(hwk_context* context, const float* x, int64_t rows, int64_t in, int64_t ldx, const void* shrink,
                      const void* expand, const float* scales, int64_t rank, int32_t format, int64_t out, float* y,
                      int64_t ldy) {
  if (rank % kRankBlock || rank > kMostRanks) return kWrongMatrix;
  Adapt args{LowRank{shrink, expand, scales, in, out, rank, format}, x, y, ldx, ldy};
  spread(context, args, context->level.adapt, rows, rank * (in + out));
  return kDone;
}

// exp of n floats, for the accuracy test.
HWK_API int hwk_exp(hwk_context* context, const float* x, int64_t n, float* y) {
  context->level.exp(x, y, n);
  return kDone;
}
