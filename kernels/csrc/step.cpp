// One step through the layers, walked by all threads of a team at once.
//
// Products, and attention, share out their parts; what stands between them is done row by row: either shared out as
// well, or, when rows are so few that a meeting would cost more, by every thread for itself. Who computes a part never
// changes its bits, so every way gives the same ones.
//
//     rows: x += delta, norm, quantize | product: qkv | rows: rotate, write cells | attention | rows: quantize |
//     product: o | rows: x += delta, norm, quantize | product: gate, up | rows: silu, quantize | product: down -> delta
#include <cstring>

#include "decoder.h"

namespace hwk {
namespace {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

void add_row(float* x, const float* delta, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += delta[i];
}

// Takes logits of the ids from `id` on into account; they come in ascending order of ids.
void compare(const float* logits, int64_t n, int64_t id, Best& best) {
  F4 top = {best.value, best.value, best.value, best.value};
  I4 unordered = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    F4 four;
    std::memcpy(&four, logits + i, sizeof four);
    unordered |= four != four;
    top = four > top ? four : top;
  }
  float highest = best.value;
  for (int lane = 0; lane < 4; ++lane) {
    if (unordered[lane]) best.is_nan = true;
    if (top[lane] > highest) highest = top[lane];
  }
  for (; i < n; ++i) {
    if (logits[i] != logits[i]) best.is_nan = true;
    if (logits[i] > highest) highest = logits[i];
  }
  if (!(highest > best.value)) return;
  best.value = highest;
  for (i = 0; logits[i] != highest; ++i) {
  }
  best.id = id + i;
}

class Walk {
 public:
  Walk(Step& step, int thread)
      : step_(step), model_(step.model), batch_(step.batch), work_(step.work), team_(step.team), level_(step.level),
        thread_(thread), own_(step.work.own[static_cast<size_t>(thread)]), queries_(&step.work.all),
        rows_(step.batch.rows) {
    bool small = step.is_small;
    x_ = (small ? own_.x : work_.x).floats();
    normed_ = (small ? own_.normed : work_.normed).floats();
    inner_ = (small ? own_.inner : work_.inner).floats();
    records_ = (small ? own_.records : work_.records).get();
    q_ = work_.qkv.floats();
    q_stride_ = model_.qkv_size();
  }

  void run() {
    for (size_t index = 0; index < model_.layers.size(); ++index) {
      const LayerWeights& layer = model_.layers[index];
      bool is_last = index + 1 == model_.layers.size();
      each_row(rows_, [&](int64_t row) {
        index == 0 ? embed(row) : add_delta(row);
        norm(row, layer.attn_norm);
        quantize(row, layer.qkv, normed_);
      });
      multiply(layer.qkv, normed_, layer.qkv_bias, work_.qkv.floats());
      if (step_.is_small) {
        attend_own_heads(layer, index);
      } else {
        write_cells(layer, index);
        if (is_last && step_.is_narrow) keep_sampled();
        if (rows_ == 0) return;
        attend(index);
      }
      finish(layer);
    }
    if (rows_ > 0) head();
  }

 private:
  // Calls f(row) for every row; then all rows are there for this thread, or for all of them.
  template <class F>
  void each_row(int64_t rows, F f) {
    if (step_.is_small) {
      for (int64_t row = 0; row < rows; ++row) f(row);
      return;
    }
    for (Span piece; team_.claim(rows, 1, piece);)
      for (int64_t row = piece.first; row < piece.last; ++row) f(row);
    team_.meet();
  }

  void embed(int64_t row) { level_.embed(Embed{model_.embed, batch_.tokens, x_, rows_}, row, row + 1); }

  void add_delta(int64_t row) {
    add_row(x_ + row * model_.hidden, work_.delta.floats() + row * model_.hidden, model_.hidden);
  }

  void norm(int64_t row, const float* weight) {
    RmsNorm args{x_, weight, normed_, rows_, 1, model_.hidden, model_.hidden, model_.eps};
    level_.rms_norm(args, row, row + 1);
  }

  void quantize(int64_t row, const Matrix& w, const float* x) {
    if (quant_group(w.format)) level_.quantize(Quantize{x, records_, rows_, w.in, w.in, w.format}, row, row + 1);
  }

  Gemm product(const Matrix& w, const float* x, const float* bias, float* y, int64_t ldy) const {
    return Gemm{x, records_, w, bias, y, rows_, w.in, ldy};
  }

  int64_t row_blocks() const { return (rows_ + kRowBlock - 1) / kRowBlock; }

  void multiply(const Matrix& w, const float* x, const float* bias, float* y) {
    Gemm args = product(w, x, bias, y, w.out);
    int64_t parts = (w.out + kPanel - 1) / kPanel * row_blocks();
    for (Span piece; team_.claim(parts, 2, piece);) level_.gemm(args, piece.first, piece.last);
    team_.meet();
  }

  int64_t num_cells() const { return batch_.num_blocks * batch_.block_size; }

  uint8_t* cells(size_t layer) const {
    int64_t cell = model_.kv_heads * kv_head_bytes(batch_.kv_format, model_.dim);
    return batch_.kv + static_cast<int64_t>(layer) * 2 * num_cells() * cell;
  }

  // Key heads [first, last) of rows [row, end) and the query heads that read them, in place.
  void rotate(const LayerWeights& layer, int64_t row, int64_t end, Span heads) {
    int64_t group = model_.heads / model_.kv_heads, dim = model_.dim, count = heads.last - heads.first;
    float* q = work_.qkv.floats() + heads.first * group * dim;
    float* k = work_.qkv.floats() + (model_.heads + heads.first) * dim;
    int64_t stride = model_.qkv_size();
    if (layer.q_norm)
      for (int64_t r = row; r < end; ++r) {
        float *own_q = q + r * stride, *own_k = k + r * stride;
        RmsNorm q_args{own_q, layer.q_norm, own_q, 1, count * group, dim, stride, model_.eps};
        RmsNorm k_args{own_k, layer.k_norm, own_k, 1, count, dim, stride, model_.eps};
        level_.rms_norm(q_args, 0, count * group);
        level_.rms_norm(k_args, 0, count);
      }
    Rope rope{q, k, batch_.positions, model_.cos, model_.sin, rows_, count * group, count, dim, stride, stride};
    level_.rope(rope, row, end);
  }

  void write_cells(const LayerWeights& layer, size_t index) {
    WriteKv args = write_args(index, 0, model_.kv_heads, batch_.slots, num_cells());
    each_row(rows_, [&](int64_t row) {
      rotate(layer, row, row + 1, {0, model_.kv_heads});
      level_.write_kv(args, row, row + 1);
    });
  }

  // `count` key heads from `head` on; a cell holds as many.
  WriteKv write_args(size_t index, int64_t head, int64_t count, const int64_t* slots, int64_t num_cells) const {
    const float* k = work_.qkv.floats() + (model_.heads + head) * model_.dim;
    const float* v = k + model_.kv_heads * model_.dim;
    int64_t stride = model_.qkv_size();
    return WriteKv{k, v, cells(index), slots, rows_, count, model_.dim, num_cells, stride, stride, batch_.kv_format};
  }

  Attention attention_args(size_t index) const {
    return Attention{q_, cells(index), batch_.tables, queries_->row_of, queries_->positions, queries_->blocks.data(),
                     work_.mixed.floats(), rows_, model_.heads, model_.kv_heads, model_.dim, q_stride_,
                     batch_.num_blocks, batch_.block_size, batch_.table_width, model_.scale, batch_.kv_format};
  }

  float* scratch() const { return step_.scratch[static_cast<size_t>(thread_)].data(); }

  void attend(size_t index) {
    constexpr int64_t kShares = 8;  // per thread, of about equally many keys
    Attention args = attention_args(index);
    int64_t shares = kShares * team_.threads();
    auto part_at = [&](int64_t share) {
      return boundary(queries_->blocks, model_.kv_heads, queries_->cost, share, shares);
    };
    for (Span piece; team_.claim(shares, 1, piece);)
      level_.attention(args, part_at(piece.first), part_at(piece.last), scratch());
    team_.meet();
  }

  // A thread that rotates and writes the very heads it then attends to need not wait for anybody in between.
  void attend_own_heads(const LayerWeights& layer, size_t index) {
    int64_t kv_heads = model_.kv_heads;
    Span heads{kv_heads * thread_ / team_.threads(), kv_heads * (thread_ + 1) / team_.threads()};
    if (heads.first < heads.last) {
      rotate(layer, 0, rows_, heads);
      for (int64_t head = heads.first; head < heads.last; ++head) {
        const int64_t* slots = work_.head_slots.data() + head * rows_;
        level_.write_kv(write_args(index, head, 1, slots, num_cells() * kv_heads), 0, rows_);
      }
      Attention args = attention_args(index);
      for (int64_t block = 0; block < static_cast<int64_t>(queries_->blocks.size()); ++block)
        level_.attention(args, block * kv_heads + heads.first, block * kv_heads + heads.last, scratch());
    }
    team_.meet();
  }

  // The last layer's other rows have left their keys and values: nothing else of them is needed.
  void keep_sampled() {
    float *x = work_.sampled_x.floats(), *q = work_.sampled_q.floats();
    each_row(batch_.samples, [&](int64_t row) {
      int64_t from = batch_.sample_index[row];
      std::copy_n(x_ + from * model_.hidden, model_.hidden, x + row * model_.hidden);
      std::copy_n(q_ + from * q_stride_, model_.q_size(), q + row * model_.q_size());
    });
    x_ = x;
    q_ = q;
    q_stride_ = model_.q_size();
    rows_ = batch_.samples;
    queries_ = &work_.sampled;
  }

  void finish(const LayerWeights& layer) {  // of a layer: what follows its attention
    const float* mixed = work_.mixed.floats();
    if (quant_group(layer.o.format)) each_row(rows_, [&](int64_t row) { quantize(row, layer.o, mixed); });
    multiply(layer.o, mixed, nullptr, work_.delta.floats());
    each_row(rows_, [&](int64_t row) {
      add_delta(row);
      norm(row, layer.mlp_norm);
      quantize(row, layer.gate_up, normed_);
    });
    multiply(layer.gate_up, normed_, nullptr, work_.gate_up.floats());
    each_row(rows_, [&](int64_t row) {
      level_.silu_mul(SiluMul{work_.gate_up.floats(), inner_, rows_, model_.inner, 2 * model_.inner}, row, row + 1);
      quantize(row, layer.down, inner_);
    });
    multiply(layer.down, inner_, nullptr, work_.delta.floats());
  }

  void head() {
    each_row(rows_, [&](int64_t row) {
      add_delta(row);
      norm(row, model_.norm);
      quantize(row, model_.head, normed_);
    });
    if (!batch_.best) return multiply(model_.head, normed_, nullptr, batch_.logits);
    own_.best.assign(static_cast<size_t>(rows_), Best{-__builtin_inff(), false, -1});
    int64_t panels = (model_.vocab + kPanel - 1) / kPanel;
    for (Span piece; team_.claim(panels, 2, piece);)
      for (int64_t panel = piece.first; panel < piece.last; panel += kHeadPanels)
        pick(panel, panel + kHeadPanels < piece.last ? panel + kHeadPanels : piece.last);
    team_.meet();  // or the next step would find these panels claimed
  }

  void pick(int64_t panel, int64_t end) {
    int64_t column = panel * kPanel, blocks = row_blocks();
    int64_t width = (end * kPanel < model_.vocab ? end * kPanel : model_.vocab) - column;
    float* y = batch_.logits ? batch_.logits : own_.logits.floats() - column;
    int64_t stride = batch_.logits ? model_.vocab : kHeadPanels * kPanel;
    level_.gemm(product(model_.head, normed_, nullptr, y, stride), panel * blocks, end * blocks);
    for (int64_t row = 0; row < rows_; ++row)
      compare(y + row * stride + column, width, column, own_.best[static_cast<size_t>(row)]);
  }

  Step& step_;
  const Model& model_;
  const Batch& batch_;
  Workspace& work_;
  Team& team_;
  const Level& level_;
  const int thread_;
  Workspace::Own& own_;
  const Queries* queries_;
  int64_t rows_;  // of the step, then the sampled ones
  float *x_, *normed_, *inner_;
  uint8_t* records_;
  const float* q_;
  int64_t q_stride_;
};

}  // namespace

void walk(Step& step, int thread) { Walk(step, thread).run(); }

}  // namespace hwk
