// What a packed matrix must look like before a kernel is given its address. For the files of the C interface.
#pragma once

#include "level.h"

namespace hwk {

inline int64_t columns_padded(int64_t out) { return (out + 15) / 16 * 16; }

// Bytes of a packed matrix, its header included; -1: there is no such format.
inline int64_t matrix_bytes(int32_t format, int64_t out, int64_t in) {
  int64_t header = sizeof(Header), columns = columns_padded(out);
  switch (format) {
    case kF32: return out * in * 4;
    case kBf16: return header + (in + 1) / 2 * columns * 4;
    case kI8: return header + columns * 4 + quant_groups(kI8, in) * quant_group(kI8) * columns;
    case kQ4:
    case kQ4Floats: return header + quant_groups(kQ4, in) * (columns / 16) * 320;
    case kQ8:
    case kQ8Floors: return header + quant_groups(kQ8, in) * (columns / 16) * (format == kQ8 ? 320 : 384);
    case kQ4Wide: return header + quant_groups(kQ4, in) * (columns / 16) * 384;
  }
  return -1;
}

// Whether `bytes` bytes at m.data are the matrix that m says, as far as size and header tell.
inline bool is_matrix(const Matrix& m, int64_t bytes) {
  if (m.in < 1 || m.out < 1 || bytes != matrix_bytes(m.format, m.out, m.in)) return false;
  if (m.format == kF32) return true;
  const auto* header = static_cast<const Header*>(m.data);
  return header->magic == kMagic && header->format == m.format && header->out == m.out && header->in == m.in;
}

}  // namespace hwk
