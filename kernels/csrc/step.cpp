// One step through the layers, walked by all threads of a team at once.
//
// Every line below is one phase of the team: its parts are shared out, and the next begins when all are done. Bits
// of a part do not depend on the thread that computes it.
//
//     each row       x += delta, norm, quantize
//     product        qkv
//     each row       norms of heads, rotate, write cells
//     attention      of some queries over their keys
//     each row       quantize
//     product        o -> delta
//     each row       x += delta, norm, quantize
//     product        gate and up
//     each row       gate, quantize
//     product        down -> delta
//
// x += delta is delta normed and scaled where the model does that; where it does not norm x, products read x itself.
// What a row's adapter adds to a product comes with the next phase of rows, before anything reads that product.
#include <cstring>

#include "coming.h"

namespace hwk {
namespace {

constexpr int64_t kPanelsTogether = 2;  // some kernels read two adjacent panels at once
constexpr int64_t kGatePanels = 4;      // of gate, and of up
constexpr int64_t kAdaptedTogether = 4;  // rows whose adapters are looked at together
constexpr int64_t kHeadPanels = 8;      // of the head: their logits stay in the cache until they are compared

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

void add_row(float* x, const float* delta, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += delta[i];
}

void scale_row(float* x, float scale, int64_t n) {
  if (scale == 1.0f) return;
  for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

// Four lanes for each value of four bits, all ones where a bit is set.
constexpr I4 lanes_of(int bits) { return I4{-(bits & 1), -(bits >> 1 & 1), -(bits >> 2 & 1), -(bits >> 3 & 1)}; }
const I4 kLanes[16] = {lanes_of(0), lanes_of(1), lanes_of(2),  lanes_of(3),  lanes_of(4),  lanes_of(5),
                       lanes_of(6), lanes_of(7), lanes_of(8),  lanes_of(9),  lanes_of(10), lanes_of(11),
                       lanes_of(12), lanes_of(13), lanes_of(14), lanes_of(15)};

bool is_allowed(const uint8_t* bits, int64_t i) { return bits[i / 8] >> i % 8 & 1; }

// The largest of the logits whose bits are set, or `least` where that is larger.
float highest_allowed(const float* logits, int64_t n, const uint8_t* bits, float least) {
  F4 floor = {least, least, least, least}, top = floor;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    if (!bits[i / 8]) continue;
    for (int half = 0; half < 2; ++half) {
      F4 four;
      std::memcpy(&four, logits + i + 4 * half, sizeof four);
      I4 lanes = kLanes[bits[i / 8] >> 4 * half & 15] & (four > top);
      top = lanes ? four : top;
    }
  }
  float highest = least;
  for (int lane = 0; lane < 4; ++lane)
    if (top[lane] > highest) highest = top[lane];
  for (; i < n; ++i)
    if (is_allowed(bits, i) && logits[i] > highest) highest = logits[i];
  return highest;
}

// Takes logits of the ids from `id` on into account, of which `allowed` (null: all) may be best; they come in ascending
// order of ids.
void compare(const float* logits, int64_t n, int64_t id, const uint8_t* allowed, Best& best) {
  const float least = kNoBest.highest;
  F4 top = {least, least, least, least};
  I4 unordered = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    F4 four;
    std::memcpy(&four, logits + i, sizeof four);
    unordered |= four != four;
    top = four > top ? four : top;
  }
  float highest = least;
  for (int lane = 0; lane < 4; ++lane) {
    if (unordered[lane]) best.is_nan = true;
    if (top[lane] > highest) highest = top[lane];
  }
  for (; i < n; ++i) {
    if (logits[i] != logits[i]) best.is_nan = true;
    if (logits[i] > highest) highest = logits[i];
  }
  if (highest > best.highest) best.highest = highest;
  if (!(highest > best.value)) return;  // most logits end here, before their bits are looked at
  const uint8_t* bits = allowed ? allowed + id / 8 : nullptr;
  if (bits) highest = highest_allowed(logits, n, bits, best.value);
  if (!(highest > best.value)) return;
  best.value = highest;
  for (i = 0; logits[i] != highest || (bits && !is_allowed(bits, i)); ++i) {
  }
  best.id = id + i;
}

struct Span {  // of rows
  int64_t first, last;
};

class Walk {
 public:
  Walk(Step& step, int thread)
      : step_(step), model_(step.model), batch_(step.batch), work_(step.work), team_(step.team), level_(step.level),
        own_(step.work.own[static_cast<size_t>(thread)]), thread_(thread), phase_(step.first_phase), queries_(&step.work.all),
        rows_(step.batch.rows), x_(work_.x.floats()), normed_(work_.normed.floats()), inner_(work_.inner.floats()),
        records_(work_.records.get()), q_(work_.qkv.floats()), q_stride_(model_.qkv_size()) {}

  void run() {
    for (size_t index = 0; index < model_.layers.size(); ++index) {
      const LayerWeights& layer = model_.layers[index];
      bool is_last = index + 1 == model_.layers.size();
      auto begin = [&](Span rows) {
        if (index > 0) adapt_down(rows, index - 1);
      };
      each_adapted_row(begin, [&](int64_t row) {
        index == 0 ? embed(row) : add_delta(row, model_.layers[index - 1].mlp_out_norm);
        norm(row, layer.attn_norm);
        quantize(row, layer.qkv, normed_);
      });
      multiply_adapted(layer.qkv, normed_, layer.qkv_bias, work_.qkv.floats(), index, kAdaptQ, kAdaptV);
      write_cells(layer, index);
      if (is_last && batch_.samples == 0) return;
      if (is_last && step_.is_narrow) keep_sampled();
      attend(index);
      finish(layer, index);
    }
    head();
  }

 private:
  template <class Compute>
  void share(int64_t parts, int64_t grain, Compute compute) {
    team_.share(phase_++, parts, grain, compute);
  }

  template <class Compute>
  void each_row(int64_t rows, Compute compute) {
    share(rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) compute(row);
    });
  }

  // begin(rows) for some adjacent rows, then compute(row) for each of them. Rows with one adapter share what is read of
  // it if they come together.
  template <class Begin, class Compute>
  void each_adapted_row(Begin begin, Compute compute) {
    const int64_t most = (rows_ + team_.threads() - 1) / team_.threads();
    share(rows_, batch_.adapter_of ? std::min(most, kAdaptedTogether) : 1, [&](int64_t first, int64_t last) {
      begin(Span{first, last});
      for (int64_t row = first; row < last; ++row) compute(row);
    });
  }

  void embed(int64_t row) {
    level_.embed(Embed{model_.embed, batch_.tokens, x_, rows_}, row, row + 1);
    scale_row(x_ + row * model_.hidden, model_.embed_scale, model_.hidden);
  }

  void add_delta(int64_t row, const float* weight) {
    float* delta = work_.delta.floats() + row * model_.hidden;
    if (weight) level_.rms_norm(RmsNorm{delta, weight, delta, 1, 1, model_.hidden, model_.hidden, model_.eps}, 0, 1);
    scale_row(delta, model_.residual_scale, model_.hidden);
    add_row(x_ + row * model_.hidden, delta, model_.hidden);
  }

  int32_t adapter_of(int64_t row) const { return batch_.adapter_of[is_cut_ ? batch_.sample_index[row] : row]; }

  // What the adapters of these rows, where they have any, add to some columns of a product.
  void adapt(Span rows, size_t layer, Adapted which, const float* x, int64_t in, float* y, int64_t out, int64_t ldy) {
    if (!batch_.adapter_of) return;
    for (int64_t row = rows.first, end; row < rows.last; row = end) {
      const int32_t adapter = adapter_of(row);
      for (end = row + 1; end < rows.last && adapter_of(end) == adapter; ++end) {
      }
      if (adapter < 0) continue;
      const AdaptedPart& part = batch_.adapters[adapter][layer * kAdaptedProducts + which];
      if (part.rank == 0) continue;
      LowRank w{part.shrink, part.expand, part.scales, in, out, part.rank, static_cast<int32_t>(part.format)};
      level_.adapt(Adapt{w, x, y, in, ldy}, row, end);
    }
  }

  void adapt_down(Span rows, size_t layer) {
    adapt(rows, layer, kAdaptDown, inner_, model_.inner, work_.delta.floats(), model_.hidden, model_.hidden);
  }

  void norm(int64_t row, const float* weight) {
    if (!weight) {
      std::copy_n(x_ + row * model_.hidden, model_.hidden, normed_ + row * model_.hidden);
      return;
    }
    RmsNorm args{x_, weight, normed_, rows_, 1, model_.hidden, model_.hidden, model_.eps};
    level_.rms_norm(args, row, row + 1);
  }

  void quantize(int64_t row, const Matrix& w, const float* x) {
    if (quant_group(w.format)) level_.quantize(Quantize{x, records_, rows_, w.in, w.in, w.format}, row, row + 1);
  }

  Gemm product(const Matrix& w, const float* x, const float* bias, float* y, int64_t ldy) const {
    return Gemm{x, records_, w, bias, y, rows_, w.in, ldy, nullptr};
  }

  // What the adapters add after a product w of this layer, from the first to the last of it: to be asked for meanwhile.
  Beside coming(const Matrix& w, size_t layer, Adapted first, Adapted last) {
    Coming coming(own_.coming, thread_, team_.threads());
    for (int64_t adapter = 0; adapter < batch_.num_adapters; ++adapter)
      for (int which = first; which <= last; ++which)
        coming.add(batch_.adapters[adapter][layer * kAdaptedProducts + which], w.in, adapted_out(which));
    const int64_t asks = 4 * quant_groups(w.format, w.in), tiles = rows_ > 8 ? (rows_ + 7) / 8 : 1;
    return coming.beside(gemm_panels(w.out) / team_.threads() * asks * tiles / (rows_ <= 2 ? 4 : rows_ <= 4 ? 2 : 1));
  }

  int64_t adapted_out(int which) const {
    const Model& m = model_;
    if (which == kAdaptK || which == kAdaptV) return m.kv_heads * m.dim;
    return which == kAdaptQ ? m.q_size() : which == kAdaptGate || which == kAdaptUp ? m.inner : m.hidden;
  }

  void multiply_adapted(const Matrix& w, const float* x, const float* bias, float* y, size_t layer, Adapted first,
                        Adapted last) {
    if (!batch_.adapter_of) return multiply(w, x, bias, y);
    Beside beside = coming(w, layer, first, last);
    multiply(w, x, bias, y, &beside);
  }

  void multiply(const Matrix& w, const float* x, const float* bias, float* y, Beside* beside = nullptr) {
    Gemm args = product(w, x, bias, y, w.out);
    args.beside = beside;
    share(gemm_parts(rows_, w.out), kPanelsTogether, [&](int64_t first, int64_t last) { level_.gemm(args, first, last); });
  }

  uint8_t* cells(size_t layer) const {
    int64_t cell = model_.kv_heads * kv_head_bytes(batch_.kv_format, model_.dim);
    return batch_.kv + static_cast<int64_t>(layer) * 2 * batch_.num_blocks * batch_.block_size * cell;
  }

  void norm_heads(float* heads, const float* weight, int64_t count) {
    int64_t parts = model_.is_norm_wide ? 1 : count, n = count * model_.dim / parts;
    level_.rms_norm(RmsNorm{heads, weight, heads, 1, parts, n, count * model_.dim, model_.eps}, 0, parts);
  }

  void write_cells(const LayerWeights& layer, size_t index) {
    const Model& m = model_;
    int64_t stride = m.qkv_size(), num_cells = batch_.num_blocks * batch_.block_size;
    float *q = work_.qkv.floats(), *k = q + m.q_size(), *v = k + m.kv_heads * m.dim;
    Rope rope{q,          k,     batch_.positions, layer.cos, layer.sin, rows_, m.heads,
              m.kv_heads, m.dim, m.turned,         stride,    stride};
    WriteKv write{k,          v,     cells(index), batch_.slots, rows_, m.kv_heads, m.dim,
                  num_cells, stride, stride,       batch_.kv_format};
    auto begin = [&](Span rows) {
      adapt(rows, index, kAdaptQ, normed_, m.hidden, q, m.q_size(), stride);
      adapt(rows, index, kAdaptK, normed_, m.hidden, k, m.kv_heads * m.dim, stride);
      adapt(rows, index, kAdaptV, normed_, m.hidden, v, m.kv_heads * m.dim, stride);
    };
    each_adapted_row(begin, [&](int64_t row) {
      if (layer.q_norm) {
        norm_heads(q + row * stride, layer.q_norm, m.heads);
        norm_heads(k + row * stride, layer.k_norm, m.kv_heads);
      }
      level_.rope(rope, row, row + 1);
      level_.write_kv(write, row, row + 1);
    });
  }

  Attention attention_args(size_t index) const {
    return Attention{q_, cells(index), batch_.tables, queries_->row_of, queries_->positions, queries_->blocks.data(),
                     work_.mixed.floats(), rows_, model_.heads, model_.kv_heads, model_.dim, q_stride_,
                     batch_.num_blocks, batch_.block_size, batch_.table_width, model_.scale, batch_.kv_format,
                     model_.layers[index].window, model_.attn_cap};
  }

  void attend(size_t index) {
    constexpr int64_t kShares = 8;  // per thread, of about equally many keys
    Attention args = attention_args(index);
    int64_t shares = kShares * team_.threads();
    auto part_at = [&](int64_t share) {
      return boundary(queries_->blocks, model_.kv_heads, queries_->cost, share, shares);
    };
    share(shares, 1, [&](int64_t first, int64_t last) {
      level_.attention(args, part_at(first), part_at(last), own_.scratch.floats());
    });
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
    is_cut_ = true;
    q_stride_ = model_.q_size();
    rows_ = batch_.samples;
    queries_ = &work_.sampled;
  }

  void finish(const LayerWeights& layer, size_t index) {  // of a layer: what follows its attention
    const float* mixed = work_.mixed.floats();
    if (quant_group(layer.o.format)) each_row(rows_, [&](int64_t row) { quantize(row, layer.o, mixed); });
    multiply_adapted(layer.o, mixed, nullptr, work_.delta.floats(), index, kAdaptO, kAdaptO);
    auto begin = [&](Span rows) {
      adapt(rows, index, kAdaptO, mixed, model_.q_size(), work_.delta.floats(), model_.hidden, model_.hidden);
    };
    each_adapted_row(begin, [&](int64_t row) {
      add_delta(row, layer.attn_out_norm);
      norm(row, layer.mlp_norm);
      quantize(row, layer.gate_up, normed_);
    });
    is_gated_at_once(model_, batch_, rows_) ? gate_at_once(layer) : gate(layer, index);
    multiply_adapted(layer.down, inner_, nullptr, work_.delta.floats(), index, kAdaptDown, kAdaptDown);
  }

  void gate(const LayerWeights& layer, size_t index) {
    float* both = work_.gate_up.floats();
    const int64_t inner = model_.inner;
    multiply_adapted(layer.gate_up, normed_, nullptr, both, index, kAdaptGate, kAdaptUp);
    auto begin = [&](Span rows) {
      adapt(rows, index, kAdaptGate, normed_, model_.hidden, both, inner, 2 * inner);
      adapt(rows, index, kAdaptUp, normed_, model_.hidden, both + inner, inner, 2 * inner);
    };
    each_adapted_row(begin, [&](int64_t row) {
      level_.gate_mul(GateMul{both, inner_, rows_, inner, 2 * inner, model_.activation},
                      row, row + 1);
      quantize(row, layer.down, inner_);
    });
  }

  // The same for many rows: gate and up of some columns lie in a thread's cache until they are one.
  void gate_at_once(const LayerWeights& layer) {
    const int64_t groups = (gemm_panels(model_.inner) + kGatePanels - 1) / kGatePanels;
    share((rows_ + kRowBlock - 1) / kRowBlock * groups, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) gate_part(layer.gate_up, part / groups, part % groups * kGatePanels);
    });
    if (quant_group(layer.down.format)) each_row(rows_, [&](int64_t row) { quantize(row, layer.down, inner_); });
  }

  void gate_part(const Matrix& w, int64_t block, int64_t panel) {
    const int64_t panels = gemm_panels(model_.inner), end = std::min(panel + kGatePanels, panels);
    const int64_t column = panel * kPanel, width = (end - panel) * kPanel, first = block * 2 * panels;
    float* both = own_.gated.floats();
    Gemm args = product(w, normed_, nullptr, both - block * kRowBlock * 2 * width - column, 2 * width);
    level_.gemm(args, first + panel, first + end);
    args.y += width - model_.inner;
    level_.gemm(args, first + panels + panel, first + panels + end);
    for (int64_t row = block * kRowBlock; row < std::min(rows_, (block + 1) * kRowBlock); ++row, both += 2 * width)
      level_.gate_mul(GateMul{both, inner_ + row * model_.inner + column, 1, width, 2 * width, model_.activation}, 0, 1);
  }

  void head() {
    each_adapted_row([&](Span rows) { adapt_down(rows, model_.layers.size() - 1); }, [&](int64_t row) {
      add_delta(row, model_.layers.back().mlp_out_norm);
      norm(row, model_.norm);
      quantize(row, model_.head, normed_);
    });
    if (!batch_.best) {
      multiply(model_.head, normed_, nullptr, batch_.logits);
      if (changes_logits())
        each_row(rows_, [&](int64_t row) { change_logits(batch_.logits + row * model_.vocab, model_.vocab); });
      return;
    }
    share(gemm_panels(model_.vocab), kPanelsTogether, [&](int64_t first, int64_t last) {
      for (int64_t panel = first; panel < last; panel += kHeadPanels) pick(panel, std::min(panel + kHeadPanels, last));
    });
  }

  bool changes_logits() const { return model_.logit_scale != 1.0f || model_.logit_cap != 0.0f; }

  void change_logits(float* logits, int64_t n) {
    scale_row(logits, model_.logit_scale, n);
    if (model_.logit_cap != 0.0f) level_.soft_cap(SoftCap{logits, logits, model_.logit_cap}, 0, n);
  }

  void pick(int64_t panel, int64_t end) {
    int64_t column = panel * kPanel, panels = gemm_panels(model_.vocab);
    int64_t width = std::min(end * kPanel, model_.vocab) - column;
    float* y = batch_.logits ? batch_.logits : own_.logits.floats() - column;
    int64_t stride = batch_.logits ? model_.vocab : kHeadPanels * kPanel;
    for (int64_t block = 0; block < gemm_parts(rows_, model_.vocab); block += panels)
      level_.gemm(product(model_.head, normed_, nullptr, y, stride), block + panel, block + end);
    static_assert(kPanel % 8 == 0, "the bits of a panel begin with a byte");
    for (int64_t row = 0; row < rows_; ++row) {
      if (changes_logits()) change_logits(y + row * stride + column, width);
      compare(y + row * stride + column, width, column, batch_.allowed_for(row, model_.vocab),
              own_.best[static_cast<size_t>(row)]);
    }
  }

  Step& step_;
  const Model& model_;
  const Batch& batch_;
  Workspace& work_;
  Team& team_;
  const Level& level_;
  Workspace::Own& own_;
  const int thread_;
  uint32_t phase_;
  const Queries* queries_;
  int64_t rows_;  // of the step, then the sampled ones
  bool is_cut_ = false;  // they are the sampled ones
  float *x_, *normed_, *inner_;
  uint8_t* records_;
  const float* q_;
  int64_t q_stride_;
};

}  // namespace

bool is_gated_at_once(const Model& model, const Batch& batch, int64_t rows) {
  return rows > kRowBlock && model.inner % kPanel == 0 && !batch.adapter_of;
}

int64_t own_gated_bytes() { return kRowBlock * 2 * kGatePanels * kPanel * 4; }

int64_t own_logits_bytes(int64_t samples) { return samples * kHeadPanels * kPanel * 4; }

void walk(Step& step, int thread) { Walk(step, thread).run(); }

}  // namespace hwk
