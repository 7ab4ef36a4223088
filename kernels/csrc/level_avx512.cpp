// The kernels compiled for level avx512. Includes no library header but those of the lanes; level.h says why.
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own intrinsics pass a deliberately undefined register and are then warned about.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "level.h"
#include "nibbles_avx512.h"

namespace hwk {
#include "quant.inc"
#include "gemm.inc"
#include "gemm_i8.inc"
#include "gemm_q4.inc"
#include "gemm_q4_floats.inc"
#include "gemm_q8.inc"
#include "matrix.inc"
#include "rows.inc"
#include "low_rank.inc"
#include "kv.inc"
#include "attention.inc"

extern const Level kAvx512 = {quantize, gemm, embed, rms_norm, layer_norm, rope,
                              write_kv, gate_mul, gelu, soft_cap, attention, exp_row, adapt};
}  // namespace hwk
