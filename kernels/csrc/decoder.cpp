// The C interface of the native decoder: takes a model's weights, checks a step, sends the threads through it.
//
// As in api.cpp, shapes and sizes of the arrays are the caller's duty, and values inside them are checked here, all
// of them before the first cell is written. A decoder keeps addresses of weights that the caller keeps alive.
#include "decoder.h"

#include "matrix.h"

namespace {

using namespace hwk;

// Status of a step, besides kDone.
enum Fault { kBadToken = 1, kBadPosition = 2, kBadSlot = 3, kBadTable = 4, kBadSample = 5, kNoMemory = 6, kBadMask = 7, kBadAdapter = 8 };

// Reads the weights in the order in which models/native.py lists them.
class Reader {
 public:
  explicit Reader(const int64_t* words) : words_(words) {}
  int64_t number() { return *words_++; }
  const float* vector() { return reinterpret_cast<const float*>(static_cast<intptr_t>(*words_++)); }
  Matrix matrix(int64_t out, int64_t in) {
    Matrix m{reinterpret_cast<const void*>(static_cast<intptr_t>(words_[0])), in, out, static_cast<int32_t>(words_[1])};
    is_good_ = is_good_ && is_matrix(m, words_[2]);
    words_ += 3;
    return m;
  }
  bool is_good() const { return is_good_; }

 private:
  const int64_t* words_;
  bool is_good_ = true;
};

void read_weights(Model& model, size_t layers, Reader& reader) {
  int64_t hidden = model.hidden;
  model.embed = reader.matrix(model.vocab, hidden);
  model.head = reader.matrix(model.vocab, hidden);
  model.norm = reader.vector();
  model.layers.resize(layers);
  for (LayerWeights& layer : model.layers) {
    layer.qkv = reader.matrix(model.qkv_size(), hidden);
    layer.o = reader.matrix(hidden, model.q_size());
    layer.gate_up = reader.matrix(2 * model.inner, hidden);
    layer.down = reader.matrix(hidden, model.inner);
    for (const float** vector : {&layer.attn_norm, &layer.attn_out_norm, &layer.mlp_norm, &layer.mlp_out_norm,
                                 &layer.qkv_bias, &layer.q_norm, &layer.k_norm, &layer.cos, &layer.sin})
      *vector = reader.vector();
    layer.window = reader.number();
  }
}

// Bytes per row of the quantized inputs of any product.
int64_t record_bytes(const Model& model) {
  int64_t most = quant_bytes(model.head.format, model.head.in);
  for (const LayerWeights& layer : model.layers)
    for (const Matrix& w : {layer.qkv, layer.o, layer.gate_up, layer.down})
      most = std::max(most, quant_bytes(w.format, w.in));
  return most;
}

bool are_blocks_known(const Batch& b, int64_t row, int64_t cells) {
  const int32_t* table = b.tables + row * b.table_width;
  for (int64_t i = 0; i * b.block_size < cells; ++i)
    if (table[i] < 0 || table[i] >= b.num_blocks) return false;
  return true;
}

int check(const Model& model, const Batch& b) {
  if (!all_below(b.tokens, b.rows, model.vocab)) return kBadToken;
  if (!all_below(b.positions, b.rows, std::min(model.length, b.table_width * b.block_size))) return kBadPosition;
  if (!all_below(b.slots, b.rows, b.num_blocks * b.block_size)) return kBadSlot;
  if (!all_below(b.sample_index, b.samples, b.rows)) return kBadSample;
  if (b.allowed)
    for (int64_t i = 0; i < b.samples; ++i)
      if (b.line_of[i] < -1 || b.line_of[i] >= b.allowed_lines) return kBadMask;
  if (b.adapter_of)
    for (int64_t t = 0; t < b.rows; ++t)
      if (b.adapter_of[t] < -1 || b.adapter_of[t] >= b.num_adapters) return kBadAdapter;
  int64_t furthest = 0;  // cells of the row of tables that the tokens so far look at
  for (int64_t t = 0; t < b.rows; ++t) {
    if (b.row_of[t] < 0 || b.row_of[t] >= b.num_tables) return kBadTable;
    furthest = std::max(t > 0 && b.row_of[t] == b.row_of[t - 1] ? furthest : 0, b.positions[t] + 1);
    bool is_end = t + 1 == b.rows || b.row_of[t + 1] != b.row_of[t];
    if (is_end && !are_blocks_known(b, b.row_of[t], furthest)) return kBadTable;
  }
  return kDone;
}

bool samples_every_row_in_order(const Batch& b) {
  if (b.samples != b.rows) return false;
  for (int64_t i = 0; i < b.samples; ++i)
    if (b.sample_index[i] != i) return false;
  return true;
}

void cut(Queries& queries, const Batch& b, const int64_t* positions, const int32_t* row_of, int64_t rows) {
  queries.positions = positions;
  queries.row_of = row_of;
  Attention args{};
  args.row_of = row_of;
  args.positions = positions;
  args.rows = rows;
  args.table_width = b.table_width;
  args.block_size = b.block_size;
  queries.cost = cut_queries(args, b.num_tables, queries.blocks);
}

void cut_sampled(Workspace& work, const Batch& b) {
  work.sampled_positions.resize(static_cast<size_t>(b.samples));
  work.sampled_row_of.resize(static_cast<size_t>(b.samples));
  for (int64_t i = 0; i < b.samples; ++i) {
    work.sampled_positions[static_cast<size_t>(i)] = b.positions[b.sample_index[i]];
    work.sampled_row_of[static_cast<size_t>(i)] = b.row_of[b.sample_index[i]];
  }
  cut(work.sampled, b, work.sampled_positions.data(), work.sampled_row_of.data(), b.samples);
}

void reserve_own(hwk_decoder& decoder, const Batch& b) {
  const Model& model = decoder.model;
  for (Workspace::Own& own : decoder.work.own) {
    if (is_gated_at_once(model, b, b.rows)) own.gated.reserve(own_gated_bytes());
    own.coming.reserve(static_cast<size_t>(b.num_adapters * kMostExtents));
    own.scratch.reserve(attention_scratch(model.heads, model.kv_heads, model.dim) * 4);
    // A thread that comes too late to look at any logits must not keep what it found in an earlier step.
    if (b.best) own.best.assign(static_cast<size_t>(b.samples), kNoBest);
    if (b.best && !b.logits) own.logits.reserve(own_logits_bytes(b.samples));
  }
}

// After this no thread of the step allocates.
void reserve(hwk_decoder& decoder, const Batch& b) {
  const Model& model = decoder.model;
  Workspace& work = decoder.work;
  int64_t rows = std::max(b.rows, b.samples);
  work.x.reserve(rows * model.hidden * 4);
  work.normed.reserve(rows * model.hidden * 4);
  work.delta.reserve(rows * model.hidden * 4);
  work.qkv.reserve(rows * model.qkv_size() * 4);
  work.mixed.reserve(rows * model.q_size() * 4);
  int64_t gated_rows = is_gated_at_once(model, b, rows) ? kRowBlock : rows;  // the last layer may have few
  work.gate_up.reserve(gated_rows * 2 * model.inner * 4);
  work.inner.reserve(rows * model.inner * 4);
  work.records.reserve(rows * record_bytes(model));
  work.sampled_x.reserve(b.samples * model.hidden * 4);
  work.sampled_q.reserve(b.samples * model.q_size() * 4);
  reserve_own(decoder, b);
}

// -1: the logits were not finite; -2: none that may be had was above minus infinity.
void choose(const Workspace& work, const Batch& b) {
  for (int64_t i = 0; i < b.samples; ++i) {
    Best best = kNoBest;
    for (const Workspace::Own& own : work.own) {
      const Best& other = own.best[static_cast<size_t>(i)];
      best.is_nan = best.is_nan || other.is_nan;
      best.highest = std::max(best.highest, other.highest);
      bool is_better = other.value > best.value || (other.value == best.value && other.id < best.id);
      if (other.id >= 0 && is_better) {
        best.value = other.value;
        best.id = other.id;
      }
    }
    bool is_finite = !best.is_nan && best.highest - best.highest == 0.0f;
    b.best[i] = !is_finite ? -1 : best.id < 0 ? -2 : best.id;
  }
}

void run(hwk_decoder& decoder, const Batch& b) {
  Workspace& work = decoder.work;
  bool is_narrow = !samples_every_row_in_order(b);
  reserve(decoder, b);
  cut(work.all, b, b.positions, b.row_of, b.rows);
  if (is_narrow) cut_sampled(work, b);
  hwk_context& context = *decoder.context;
  Step step{decoder.model, b, context.level, work, decoder.team, decoder.team.phase(), is_narrow};
  context.pool.invite([](void* argument, int thread, int) { walk(*static_cast<Step*>(argument), thread); }, &step);
  if (b.best) choose(work, b);
}

}  // namespace

// sizes: vocab, hidden, inner, layers, heads, kv_heads, dim, rows of cos and sin, numbers that rotate, activation,
// whether q_norm and k_norm are wide. factors: eps, scale of scores, of embeddings, of what is added, of logits; caps of
// logits and of scores. weights: see models/native.py.
// Null: a matrix is not what its place asks for, or memory is short. Destroy it before the context.
HWK_API hwk_decoder* hwk_decoder_create(hwk_context* context, const int64_t* sizes, const float* factors,
                                        const int64_t* weights) {
  try {
    Model model{};
    model.vocab = sizes[0], model.hidden = sizes[1], model.inner = sizes[2];
    model.heads = sizes[4], model.kv_heads = sizes[5], model.dim = sizes[6], model.length = sizes[7];
    model.turned = sizes[8], model.activation = static_cast<int32_t>(sizes[9]), model.is_norm_wide = sizes[10] != 0;
    model.eps = factors[0], model.scale = factors[1], model.embed_scale = factors[2];
    model.residual_scale = factors[3], model.logit_scale = factors[4];
    model.logit_cap = factors[5], model.attn_cap = factors[6];
    Reader reader(weights);
    read_weights(model, static_cast<size_t>(sizes[3]), reader);
    return reader.is_good() ? new hwk_decoder(context, std::move(model)) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

HWK_API void hwk_decoder_destroy(hwk_decoder* decoder) { delete decoder; }

// Writes the keys and values of all rows and, where asked for, logits and best tokens of the sampled ones: of all, or of
// those whose bits are set. adapters: addresses of what models/native.py lists for each adapter of the step.
HWK_API int hwk_decoder_forward(hwk_decoder* decoder, const int64_t* tokens, const int64_t* positions,
                                const int64_t* slots, const int32_t* row_of, int64_t rows, const int32_t* tables,
                                int64_t num_tables, int64_t table_width, const int64_t* sample_index, int64_t samples,
                                void* kv, int32_t kv_format, int64_t num_blocks, int64_t block_size, float* logits,
                                int64_t* best, const uint8_t* allowed, int64_t allowed_lines,
                                const int32_t* line_of, const int32_t* adapter_of, const void* adapters,
                                int64_t num_adapters) {
  Batch batch{tokens, positions,   slots,   row_of,     tables,     sample_index,
              rows,   num_tables,  table_width, samples, static_cast<uint8_t*>(kv), num_blocks,
              block_size, kv_format, logits, best, allowed, allowed_lines, line_of, adapter_of,
              static_cast<const AdaptedPart* const*>(adapters), num_adapters};
  std::lock_guard<std::mutex> lock(decoder->context->mutex);
  int fault = check(decoder->model, batch);
  if (fault || rows == 0) return fault;
  try {
    run(*decoder, batch);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return kDone;
}
