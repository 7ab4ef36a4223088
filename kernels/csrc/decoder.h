// A whole model and one step of it. decoder.cpp owns memory and checks, step.cpp computes.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "split.h"

namespace hwk {

constexpr int64_t kLargePage = 2 << 20;

// 64-byte aligned bytes that grow to the largest size ever asked for. Growing forgets what was in them. What many rows
// fill lies in large pages where the system has them: the addresses of small ones take time to look up.
class Bytes {
 public:
  void reserve(int64_t size) {
    if (size <= size_) return;
    const size_t unit = size < kLargePage / 2 ? 64 : kLargePage;
    size_t rounded = (static_cast<size_t>(size) + unit - 1) / unit * unit;
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(unit, rounded)));
#ifdef MADV_HUGEPAGE
    if (data_ && unit == kLargePage) madvise(data_.get(), rounded, MADV_HUGEPAGE);
#endif
    size_ = data_ ? static_cast<int64_t>(rounded) : 0;
    if (!data_) throw std::bad_alloc();
  }
  uint8_t* get() const { return data_.get(); }
  float* floats() const { return reinterpret_cast<float*>(data_.get()); }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  int64_t size_ = 0;
};

struct LayerWeights {
  Matrix qkv, o, gate_up, down;
  const float *attn_norm, *attn_out_norm, *mlp_norm, *mlp_out_norm;  // null where the model has none, as below
  const float *qkv_bias, *q_norm, *k_norm;
  const float *cos, *sin;  // [length, turned / 2]
  int64_t window;          // keys that a query sees; 0: all
};

// What an adapter adds to the products of one layer. Its words are those of every layer, one after the other.
enum Adapted { kAdaptQ = 0, kAdaptK, kAdaptV, kAdaptO, kAdaptGate, kAdaptUp, kAdaptDown, kAdaptedProducts };
constexpr int64_t kMostExtents = 6;  // of an adapter after one product: two for each of q, k and v
struct AdaptedPart {
  const void *shrink, *expand;
  const float* scales;
  int64_t rank, format;  // rank 0: it adds nothing
};

struct Model {
  int64_t vocab, hidden, inner, heads, kv_heads, dim;
  int64_t length;  // rows of the rotary tables
  int64_t turned;  // numbers of a head that rotate
  int32_t activation;
  bool is_norm_wide;  // q_norm and k_norm are over all heads together
  float eps, scale;
  float embed_scale, residual_scale, logit_scale;  // 1: none
  float logit_cap, attn_cap;                       // 0: none
  Matrix embed, head;
  const float* norm;
  std::vector<LayerWeights> layers;

  int64_t q_size() const { return heads * dim; }
  int64_t qkv_size() const { return (heads + 2 * kv_heads) * dim; }
};

// One step as it arrives; every index in it is checked before a cell is written. See models/batch.py.
struct Batch {
  const int64_t *tokens, *positions, *slots;  // [rows]
  const int32_t* row_of;                      // [rows]
  const int32_t* tables;                      // [num_tables, table_width]
  const int64_t* sample_index;                // [samples]
  int64_t rows, num_tables, table_width, samples;
  uint8_t* kv;  // [layers, 2, num_blocks, block_size, kv_heads, head record]
  int64_t num_blocks, block_size;
  int32_t kv_format;
  float* logits;  // [samples, vocab], or null
  int64_t* best;  // [samples], or null
  const uint8_t* allowed;  // [allowed_lines, mask bytes] a bit per token, lowest first: set ones may be best; or null
  int64_t allowed_lines;
  const int32_t* line_of;  // [samples] line of `allowed` that holds for it, -1: every token may be best

  const int32_t* adapter_of;              // [rows] index of the token's adapter, -1: none; or null
  const AdaptedPart* const* adapters;     // [num_adapters], each [layers, kAdaptedProducts]
  int64_t num_adapters;

  const uint8_t* allowed_for(int64_t sample, int64_t vocab) const {
    return allowed && line_of[sample] >= 0 ? allowed + line_of[sample] * ((vocab + 7) / 8) : nullptr;
  }
};

// Queries of a step, cut for attention: all of its rows, or the sampled ones alone.
struct Queries {
  const int64_t* positions;
  const int32_t* row_of;
  int64_t cost;
  std::vector<QueryBlock> blocks;
};

// The best token of a row so far: the lowest id among the largest logits of those it may have.
struct Best {
  float highest;  // of all logits, whether the row may have them or not
  float value;
  bool is_nan;  // one of the logits was
  int64_t id;   // -1: none was above minus infinity
};
constexpr Best kNoBest{-__builtin_inff(), -__builtin_inff(), false, -1};

// Written and read by the threads of a step; `own` holds what no other thread touches.
struct Workspace {
  struct Own {
    Bytes logits, scratch, gated;
    std::vector<Best> best;
    std::vector<Extent> coming;  // what a thread asks for of adapters during a product
  };
  Bytes x, normed, qkv, mixed, delta, gate_up, inner, records;
  Bytes sampled_x, sampled_q;
  std::vector<int64_t> sampled_positions;
  std::vector<int32_t> sampled_row_of;
  Queries all, sampled;
  std::vector<Own> own;
};

struct Step {
  const Model& model;
  const Batch& batch;
  const Level& level;
  Workspace& work;
  Team& team;
  uint32_t first_phase;  // of the team
  bool is_narrow;  // not every row is sampled, in order: the last layer drops the rest once their cells are written
};

// Bytes of logits that a thread keeps when only the best are asked for.
int64_t own_logits_bytes(int64_t samples);
int64_t own_gated_bytes();
bool is_gated_at_once(const Model& model, const Batch& batch, int64_t rows);  // or gate and up of all rows are kept

// Takes part in the step as thread `thread` of the team; when it returns, the step is done.
void walk(Step& step, int thread);

}  // namespace hwk

// Calls are serialized by the context's mutex.
struct hwk_decoder {
  hwk_decoder(hwk_context* owner, hwk::Model weights)
      : context(owner), model(std::move(weights)), team(owner->pool.threads()) {
    work.own.resize(static_cast<size_t>(owner->pool.threads()));
  }
  hwk_context* context;
  hwk::Model model;
  hwk::Team team;
  hwk::Workspace work;
};
