// The kernels compiled for level generic. Includes no library header but those of the lanes; level.h says why.
#include "level.h"
#include "nibbles_generic.h"

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

extern const Level kGeneric = {quantize, gemm, embed, rms_norm, layer_norm, rope,
                               write_kv, gate_mul, gelu, soft_cap, attention, exp_row, adapt};
}  // namespace hwk
