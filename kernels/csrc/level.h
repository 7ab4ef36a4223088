// The seam between the dispatcher and one instruction level: plain argument records and a table of functions.
//
// Every function computes the parts [first, last) of a call. What a part is stands beside each record. Parts write
// disjoint outputs and read no other part's output, so neither the number of threads nor their order can change a bit.
// No standard containers here: this header is compiled with several sets of machine flags, and an inline function
// shared between them could leave AVX-512 code on a path that every machine takes.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace hwk {

constexpr int kPanel = 48;       // columns of a packed weight panel, at every level
constexpr int kRowBlock = 128;   // most rows of one matrix part
constexpr int kKeyTile = 64;     // keys per online softmax step; changing it changes bits
constexpr int kQueryBlock = 8;   // queries of one row that walk the keys together

// How a matrix is packed. A float32 one is the panels alone, see gemm.inc; any other is a blob of 64-byte aligned
// sections that begins with a Header, followed by what the file of the format's kernel describes.
// kQ4Floats is kQ4 whose weights become floats before they are multiplied; kQ4Wide is that with d and m as floats.
enum Format : int32_t { kF32 = 0, kBf16 = 1, kI8 = 2, kQ4 = 3, kQ4Floats = 4, kQ4Wide = 5, kQ8 = 6, kQ8Floors = 7 };

struct Header {
  int64_t magic, format, out, in, zero[4];
};
static_assert(sizeof(Header) == 64, "sections are 64-byte aligned");
constexpr int64_t kMagic = 0x3158'5254'414D'5748;  // the bytes HWMATRX1

struct Matrix {      // w [out, in], packed; the caller checked that data holds what the rest says
  const void* data;  // the header where the format has one
  int64_t in, out;
  int32_t format;
};

// Columns of the inputs that share a scale when the format multiplies small integers; 0: it multiplies floats.
static constexpr int64_t quant_group(int32_t format) {
  return format == kI8 ? 64 : format == kQ4 ? 32 : format == kQ8 || format == kQ8Floors ? 16 : 0;
}
static constexpr int64_t quant_groups(int32_t format, int64_t in) {
  return quant_group(format) ? (in + quant_group(format) - 1) / quant_group(format) : 0;
}
// Quantized inputs are one record per row: int8 q[groups * group], float scale[groups], int32 start[groups], all
// beginning at a multiple of 64 bytes. start is the group's sum of q times quant_start: what the group adds to every
// column's sum of products beyond the products themselves, since kI8 and kQ8 store their weights with 128 added.
static constexpr int32_t quant_start(int32_t format) { return format == kI8 || format == kQ8 ? -128 : 1; }
static constexpr int64_t quant_bytes(int32_t format, int64_t in) {
  return (quant_groups(format, in) * (quant_group(format) + 8) + 63) / 64 * 64;
}

// A part is one row.
struct Quantize {
  const float* x;      // [rows, in], row stride ldx
  void* records;       // quant_bytes(format, in) bytes per row, 64-byte aligned
  int64_t rows, in, ldx;
  int32_t format;
};

// What will be read after a product: it is asked for while the product is computed. Changes no result.
struct Extent {
  const char *at, *end;
};
struct Beside {
  const Extent *next, *last;  // not begun yet
  Extent now;
  int64_t lines;  // to ask for at a time
};

// out[t, n] = bias[n] + sum over k, in ascending k, of x[t, k] * w[n, k].
// A part is one panel times one block of rows; part = row_block * num_panels + panel.
struct Gemm {
  const float* x;      // [rows, in], row stride ldx; for the formats that multiply floats
  const void* records; // what Quantize left; for the others
  Matrix w;
  const float* bias;   // [out] or null
  float* y;            // [rows, out], row stride ldy
  int64_t rows, ldx, ldy;
  Beside* beside;      // of the calling thread, or null; kI8 alone heeds it
};

static constexpr int64_t gemm_panels(int64_t out) { return (out + kPanel - 1) / kPanel; }
static constexpr int64_t gemm_parts(int64_t rows, int64_t out) {
  return (rows + kRowBlock - 1) / kRowBlock * gemm_panels(out);
}

// A part is one token.
struct Embed {
  Matrix w;
  const int64_t* ids;  // [rows], each below w.out
  float* y;            // [rows, in]
  int64_t rows;
};

// A part is one (outer, inner) row; part = outer * inner_rows + inner.
struct RmsNorm {
  const float* x;      // [outer, inner, n], outer stride ldx
  const float* weight; // [n]
  float* y;            // [outer, inner, n]
  int64_t outer, inner, n, ldx;
  float eps;
};

// (x - mean) / sqrt(variance + eps) * weight + bias. A part is one row.
struct LayerNorm {
  const float* x;      // [rows, n], row stride ldx
  const float* weight; // [n]
  const float* bias;   // [n]
  float* y;            // [rows, n]
  int64_t rows, n, ldx;
  float eps;
};

// A part is one token.
struct Rope {
  float* q;            // [rows, q_heads, dim], row stride ldq
  float* k;            // [rows, k_heads, dim], row stride ldk
  const int64_t* positions;
  const float* cos;    // [length, turned / 2]
  const float* sin;    // [length, turned / 2]
  int64_t rows, q_heads, k_heads, dim, turned, ldq, ldk;  // of a head's numbers the first `turned` rotate
};

// How the KV memory keeps one head of one token, its record: floats, IEEE halves, or a float and the signed bytes it
// multiplies. A record may begin at any address.
enum KvFormat : int32_t { kKvF32 = 0, kKvF16 = 1, kKvI8 = 2 };
static constexpr int64_t kv_head_bytes(int32_t kv_format, int64_t dim) {
  return kv_format == kKvF32 ? 4 * dim : kv_format == kKvF16 ? 2 * dim : 4 + dim;
}

// A part is one token.
struct WriteKv {
  const float* k;      // [rows, kv_heads, dim], row stride ldk
  const float* v;      // [rows, kv_heads, dim], row stride ldv
  uint8_t* cells;      // [2, num_cells, kv_heads, record]
  const int64_t* slots;
  int64_t rows, kv_heads, dim, num_cells, ldk, ldv;
  int32_t kv_format;
};

enum Activation : int32_t { kSilu = 0, kGelu = 1 };

// A part is one token.
struct GateMul {
  const float* x;      // [rows, 2 * inner], row stride ldx
  float* y;            // [rows, inner]
  int64_t rows, inner, ldx;
  int32_t activation;
};

// y = x / 2 (1 + erf(x / sqrt 2)), in place or not. A part is one number.
struct Gelu {
  const float* x;
  float* y;
};

// What an adapter adds to a product, as low_rank.inc lays it out; numbers are floats, halves or signed bytes (KvFormat).
constexpr int64_t kRankBlock = 8;   // ranks are padded to a multiple with zeros
constexpr int64_t kMostRanks = 256;
struct LowRank {
  const void *shrink, *expand;
  const float* scales;    // [rank] multiply what x is shrunk to
  int64_t in, out, rank;
  int32_t format;
};

// y += expanded (shrunk x). A part is one row.
struct Adapt {
  LowRank w;
  const float* x;      // [rows, in], row stride ldx
  float* y;            // [rows, out], row stride ldy
  int64_t ldx, ldy;
};

// y = cap * tanh(x / cap), in place or not. A part is one number.
struct SoftCap {
  const float* x;
  float* y;
  float cap;
};

// Adjacent queries of one row. `cost` counts keys over all earlier blocks, for an even split.
struct QueryBlock {
  int64_t first, count, cost;
  bool is_of_many;  // the row has more queries than a block takes
};

// A part is one block of queries times one key head; part = block * kv_heads + kv_head.
struct Attention {
  const float* q;           // [rows, heads, dim], row stride ldq
  const uint8_t* kv;        // [2, num_blocks, block_size, kv_heads, record]
  const int32_t* tables;    // [num_tables, table_width]
  const int32_t* row_of;    // [rows]
  const int64_t* positions; // [rows]
  const QueryBlock* blocks;
  float* y;                 // [rows, heads, dim]
  int64_t rows, heads, kv_heads, dim, ldq, num_blocks, block_size, table_width;
  float scale;
  int32_t kv_format;
  int64_t window;           // keys that a query sees, the last ones; 0: all
  float cap;                // of the scaled scores, see SoftCap; 0: none

  int64_t nearest(int64_t t) const {  // first key that query t sees
    return window && positions[t] >= window ? positions[t] - window + 1 : 0;
  }
};

struct Level {
  void (*quantize)(const Quantize&, int64_t first, int64_t last);
  void (*gemm)(const Gemm&, int64_t first, int64_t last);
  void (*embed)(const Embed&, int64_t first, int64_t last);
  void (*rms_norm)(const RmsNorm&, int64_t first, int64_t last);
  void (*layer_norm)(const LayerNorm&, int64_t first, int64_t last);
  void (*rope)(const Rope&, int64_t first, int64_t last);
  void (*write_kv)(const WriteKv&, int64_t first, int64_t last);
  void (*gate_mul)(const GateMul&, int64_t first, int64_t last);
  void (*gelu)(const Gelu&, int64_t first, int64_t last);
  void (*soft_cap)(const SoftCap&, int64_t first, int64_t last);
  // scratch: attention_scratch(args) floats owned by the calling thread. False: a table names a block we do not have.
  bool (*attention)(const Attention&, int64_t first, int64_t last, float* scratch);
  void (*exp)(const float* x, float* y, int64_t n);
  void (*adapt)(const Adapt&, int64_t first, int64_t last);
};

// Query heads a thread works on at once: of a block of queries and one key head, or of one query and all of them. Each
// keeps its query, weighted values, scores and three numbers; each key head the scales of a tile; all of them together
// a tile of records as floats. Then room to align.
static constexpr int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
static constexpr int64_t attention_rows(int64_t heads, int64_t kv_heads) {
  int64_t block = kQueryBlock * (heads / kv_heads);
  return block > heads ? block : heads;
}
static constexpr int64_t attention_scratch(int64_t heads, int64_t kv_heads, int64_t dim) {
  int64_t rows = attention_rows(heads, kv_heads);
  return rows * (2 * padded(dim) + kKeyTile) + 3 * padded(rows) + kKeyTile * (2 * kv_heads + padded(dim)) + 16;
}

extern const Level kGeneric;
#ifdef HWK_X86_LEVELS  // set by the build where their units are compiled
extern const Level kAvx2;
extern const Level kAvx512;
extern const Level kAvx512Vnni;
#endif

}  // namespace hwk
