// What the sanitizer drivers share: the C interface, random inputs in memory of exact size, and comparison by bits.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../csrc/matrix.h"

struct hwk_context;
struct hwk_decoder;

extern "C" {
int hwk_best_level();
hwk_context* hwk_create(int threads, int level);
void hwk_destroy(hwk_context*);
int hwk_gemm(hwk_context*, const float* x, int64_t rows, int64_t in, int64_t ldx, const void* w, int32_t format,
             int64_t w_bytes, int64_t out, const float* bias, float* y);
int hwk_embed(hwk_context*, const void* w, int32_t format, int64_t w_bytes, int64_t out, int64_t in,
              const int64_t* ids, int64_t rows, float* y);
int hwk_rms_norm(hwk_context*, const float* x, int64_t outer, int64_t inner, int64_t n, int64_t ldx,
                 const float* weight, float eps, float* y);
int hwk_rope(hwk_context*, float* q, int64_t ldq, int64_t q_heads, float* k, int64_t ldk, int64_t k_heads, int64_t dim,
             int64_t turned, const int64_t* positions, int64_t rows, const float* cos, const float* sin, int64_t length);
int hwk_gate_mul(hwk_context*, const float* x, int64_t rows, int64_t inner, int64_t ldx, int32_t activation, float* y);
int hwk_layer_norm(hwk_context*, const float* x, int64_t rows, int64_t n, int64_t ldx, const float* weight,
                   const float* bias, float eps, float* y);
int hwk_adapt(hwk_context*, const float* x, int64_t rows, int64_t in, int64_t ldx, const void* shrink, const void* expand,
              const float* scales, int64_t rank, int32_t format, int64_t out, float* y, int64_t ldy);
int hwk_gelu(hwk_context*, const float* x, int64_t n, float* y);
int hwk_soft_cap(hwk_context*, const float* x, int64_t n, float cap, float* y);
int hwk_exp(hwk_context*, const float* x, int64_t n, float* y);
int hwk_write_kv(hwk_context*, const float* k, int64_t ldk, const float* v, int64_t ldv, int64_t rows,
                 int64_t kv_heads, int64_t dim, uint8_t* cells, int32_t kv_format, int64_t num_cells,
                 const int64_t* slots);
int hwk_attention(hwk_context*, const float* q, int64_t ldq, int64_t rows, int64_t heads, int64_t kv_heads,
                  int64_t dim, const uint8_t* kv, int32_t kv_format, int64_t num_blocks, int64_t block_size,
                  const int32_t* tables, int64_t num_tables, int64_t table_width, const int32_t* row_of,
                  const int64_t* positions, float scale, int64_t window, float cap, float* y);
hwk_decoder* hwk_decoder_create(hwk_context*, const int64_t* sizes, const float* factors, const int64_t* weights);
void hwk_decoder_destroy(hwk_decoder*);
int hwk_decoder_forward(hwk_decoder*, const int64_t* tokens, const int64_t* positions, const int64_t* slots,
                        const int32_t* row_of, int64_t rows, const int32_t* tables, int64_t num_tables,
                        int64_t table_width, const int64_t* sample_index, int64_t samples, void* kv, int32_t kv_format,
                        int64_t num_blocks, int64_t block_size, float* logits, int64_t* best,
                        const uint8_t* allowed, int64_t allowed_lines, const int32_t* line_of, const int32_t* adapter_of,
                        const void* adapters, int64_t num_adapters);
}

namespace check {

using Floats = std::vector<float>;

// Bytes at a cache line whose end is the end of the allocation.
struct Blob {
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  explicit Blob(int64_t count) : bytes(count) {
    void* data = nullptr;
    if (posix_memalign(&data, 64, static_cast<size_t>(count))) std::abort();
    memory.reset(static_cast<uint8_t*>(data));
  }
  uint8_t* data() const { return memory.get(); }
  std::unique_ptr<uint8_t, Free> memory;
  int64_t bytes;
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t upto(int64_t most) { return most ? static_cast<int64_t>(engine_() % static_cast<uint32_t>(most + 1)) : 0; }
  int64_t between(int64_t least, int64_t most) { return least + upto(most - least); }
  int64_t one_of(std::initializer_list<int64_t> values) { return values.begin()[upto(static_cast<int64_t>(values.size()) - 1)]; }
  float real() { return static_cast<float>(between(-1000, 1000)) / 1000.0f; }
  Floats reals(int64_t count) {
    Floats values(static_cast<size_t>(count));
    for (float& value : values) value = real();
    return values;
  }
  // A packed matrix of any content. Its bytes are those of floats, so that whatever part of it is read as scales holds
  // plain numbers.
  Blob matrix(int32_t format, int64_t out, int64_t in) {
    Blob blob(hwk::matrix_bytes(format, out, in));
    for (int64_t i = 0; i < blob.bytes; i += 4) {
      float value = real();
      std::memcpy(blob.data() + i, &value, static_cast<size_t>(blob.bytes - i < 4 ? blob.bytes - i : 4));
    }
    hwk::Header header{hwk::kMagic, format, out, in, {}};
    if (format != hwk::kF32) std::memcpy(blob.data(), &header, sizeof header);
    return blob;
  }

 private:
  std::mt19937 engine_;
};

// The formats that this library knows.
inline std::vector<int32_t> formats() {
  std::vector<int32_t> known;
  for (int32_t format : {hwk::kF32, hwk::kBf16, hwk::kI8, hwk::kQ4, hwk::kQ4Floats, hwk::kQ4Wide, hwk::kQ8,
                         hwk::kQ8Floors})
    if (hwk::matrix_bytes(format, 96, 128) > 0) known.push_back(format);
  return known;
}

inline void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

template <class T>
void require_equal(const std::vector<T>& a, const std::vector<T>& b, const std::string& what) {
  require(a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T))), what);
}

// One context per number of threads, 1 to 3, of one level.
struct Contexts {
  explicit Contexts(int level) {
    for (int threads = 1; threads <= 3; ++threads) {
      all.push_back(hwk_create(threads, level));
      require(all.back() != nullptr, "no context of level " + std::to_string(level));
    }
  }
  ~Contexts() {
    for (hwk_context* context : all) hwk_destroy(context);
  }
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;
  std::vector<hwk_context*> all;
};

void kernels(const Contexts& contexts, Random& random);  // each kernel once, of random shape
void decoder(const Contexts& contexts, Random& random);  // a few steps of a random model

}  // namespace check
