// The decoder on random models and steps: the same logits, tokens and cells from 1, 2 and 3 threads.
#include "check.h"

namespace check {
namespace {

constexpr int64_t kBlocks = 36, kBlockSize = 8, kWidth = 9, kTables = 4, kLength = kWidth * kBlockSize;

struct Weights {
  std::vector<Blob> matrices;
  std::vector<Floats> vectors;
  std::vector<int64_t> words;  // as hwk_decoder_create reads them

  void matrix(Random& random, int32_t format, int64_t out, int64_t in) {
    matrices.push_back(random.matrix(format, out, in));
    auto address = reinterpret_cast<intptr_t>(matrices.back().data());
    words.insert(words.end(), {static_cast<int64_t>(address), format, matrices.back().bytes});
  }
  void vector(Random& random, int64_t n, bool is_there = true) {
    if (is_there) vectors.push_back(random.reals(n));
    words.push_back(is_there ? static_cast<int64_t>(reinterpret_cast<intptr_t>(vectors.back().data())) : 0);
  }
};

struct Spec {
  int64_t vocab, hidden, inner, layers, heads, kv_heads, dim, turned;
  bool is_norm_wide;
};

Weights weights_of(const Spec& s, Random& random) {
  std::vector<int32_t> known = formats();
  auto format = [&] { return known[static_cast<size_t>(random.upto(static_cast<int64_t>(known.size()) - 1))]; };
  bool has_bias = random.upto(1), has_norms = random.upto(1);
  bool is_before = random.upto(1), is_behind = random.upto(1);
  Weights w;
  w.matrix(random, format(), s.vocab, s.hidden);
  w.matrix(random, format(), s.vocab, s.hidden);
  w.vector(random, s.hidden);
  for (int64_t layer = 0; layer < s.layers; ++layer) {
    w.matrix(random, format(), (s.heads + 2 * s.kv_heads) * s.dim, s.hidden);
    w.matrix(random, format(), s.hidden, s.heads * s.dim);
    w.matrix(random, format(), 2 * s.inner, s.hidden);
    w.matrix(random, format(), s.hidden, s.inner);
    for (bool is_there : {is_before, is_behind, is_before, is_behind}) w.vector(random, s.hidden, is_there);
    w.vector(random, (s.heads + 2 * s.kv_heads) * s.dim, has_bias);
    w.vector(random, (s.is_norm_wide ? s.heads : 1) * s.dim, has_norms);
    w.vector(random, (s.is_norm_wide ? s.kv_heads : 1) * s.dim, has_norms);
    w.vector(random, kLength * s.turned / 2);
    w.vector(random, kLength * s.turned / 2);
    w.words.push_back(random.upto(1) ? random.between(1, kLength) : 0);  // the window
  }
  return w;
}

struct Work {
  std::vector<int64_t> tokens, positions, slots, samples;
  std::vector<int32_t> row_of, tables;
  std::vector<uint8_t> allowed;  // one line for each token that may be sampled
  std::vector<int32_t> line_of;

  bool may_have(size_t sample, int64_t token, int64_t vocab) const {
    int64_t line = line_of[sample];
    return line < 0 || (allowed[static_cast<size_t>(line * ((vocab + 7) / 8) + token / 8)] >> token % 8 & 1);
  }
};

// Each row of the tables has blocks of its own and asks for some of its positions, often one alone.
Work work_of(const Spec& s, Random& random) {
  Work work;
  int64_t most_rows = random.one_of({1, 2, kTables});
  for (int64_t i = 0; i < kTables * kWidth; ++i) work.tables.push_back(static_cast<int32_t>(kBlocks - 1 - i));
  for (int64_t row = 0; row < most_rows; ++row) {
    int64_t first = random.upto(kLength - 1);
    int64_t last = random.upto(2) ? first : random.between(first, kLength - 1);
    for (int64_t p = first; p <= last; ++p) {
      work.tokens.push_back(random.upto(s.vocab - 1));
      work.positions.push_back(p);
      work.row_of.push_back(static_cast<int32_t>(row));
      work.slots.push_back(work.tables[static_cast<size_t>(row * kWidth + p / kBlockSize)] * kBlockSize + p % kBlockSize);
    }
  }
  auto rows = static_cast<int64_t>(work.tokens.size());
  bool all = random.upto(1);
  for (int64_t i = 0; i < rows; ++i)
    if (all || random.upto(3) == 0) work.samples.push_back(i);
  int64_t bytes = (s.vocab + 7) / 8, density = random.upto(4);
  for (int64_t i = 0; i < rows * bytes; ++i)
    work.allowed.push_back(static_cast<uint8_t>(random.upto(4) < density ? random.upto(255) : 0));
  for (size_t i = 0; i < work.samples.size(); ++i)
    work.line_of.push_back(static_cast<int32_t>(random.upto(rows)) - 1);
  return work;
}

struct Outcome {
  Floats logits;
  std::vector<int64_t> best;
  std::vector<uint8_t> kv;
};

// kind: 0 logits, 1 best tokens, 2 both.
Outcome run(hwk_decoder* decoder, const Spec& s, const Work& work, std::vector<uint8_t> kv, int32_t format, int kind) {
  Outcome out{{}, {}, std::move(kv)};
  if (kind != 1) out.logits.resize(work.samples.size() * static_cast<size_t>(s.vocab));
  if (kind != 0) out.best.resize(work.samples.size());
  int status = hwk_decoder_forward(
      decoder, work.tokens.data(), work.positions.data(), work.slots.data(), work.row_of.data(),
      static_cast<int64_t>(work.tokens.size()), work.tables.data(), kTables, kWidth, work.samples.data(),
      static_cast<int64_t>(work.samples.size()), out.kv.data(), format, kBlocks, kBlockSize,
      kind == 1 ? nullptr : out.logits.data(), kind == 0 ? nullptr : out.best.data(), work.allowed.data(),
      static_cast<int64_t>(work.tokens.size()), work.line_of.data(), nullptr, nullptr, 0);
  require(status == 0, "decoder status " + std::to_string(status));
  return out;
}

// Where logits and best tokens are both known: the first of the largest logits that may be had.
void require_best(const Outcome& out, const Spec& s, const Work& work) {
  for (size_t i = 0; i < work.samples.size(); ++i) {
    const float* line = out.logits.data() + i * static_cast<size_t>(s.vocab);
    int64_t best = -2;
    for (int64_t token = 0; token < s.vocab; ++token) {
      if (!(line[token] - line[token] == 0.0f)) best = -1;
      if (best == -1) break;
      if (work.may_have(i, token, s.vocab) && (best < 0 || line[token] > line[best])) best = token;
    }
    require(best == -1 || out.best[i] == best, "best is " + std::to_string(out.best[i]) + ", wanted " +
                                                   std::to_string(best));
  }
}

}  // namespace

void decoder(const Contexts& contexts, Random& random) {
  int64_t kv_heads = random.between(1, 3);
  int64_t inner = random.upto(2) ? random.between(1, 200) : hwk::kPanel * random.between(1, 6);
  Spec s{random.between(1, 900), random.between(1, 130), inner, random.between(1, 3),
         kv_heads * random.between(1, 4), kv_heads, 2 * random.between(1, 20), 0, random.upto(1) == 1};
  s.turned = 2 * random.between(1, s.dim / 2);
  Weights weights = weights_of(s, random);
  std::vector<int64_t> sizes{s.vocab, s.hidden,  s.inner,  s.layers,       s.heads,       s.kv_heads,
                             s.dim,   kLength, s.turned, random.upto(1), s.is_norm_wide};
  Floats factors{1e-5f, 0.25f};
  for (int i = 0; i < 3; ++i) factors.push_back(random.upto(1) ? 1.0f : 0.75f);
  for (int i = 0; i < 2; ++i) factors.push_back(random.upto(1) ? 0.0f : 3.0f);
  std::vector<hwk_decoder*> decoders;
  for (hwk_context* context : contexts.all) {
    decoders.push_back(hwk_decoder_create(context, sizes.data(), factors.data(), weights.words.data()));
    require(decoders.back() != nullptr, "no decoder");
  }
  auto format = static_cast<int32_t>(random.upto(2));
  std::vector<uint8_t> kv(
      static_cast<size_t>(s.layers * 2 * kBlocks * kBlockSize * s.kv_heads * hwk::kv_head_bytes(format, s.dim)));
  for (int step = 0; step < 4; ++step) {
    Work work = work_of(s, random);
    int kind = static_cast<int>(random.upto(2));
    Outcome wanted = run(decoders[0], s, work, kv, format, kind);
    if (kind == 2) require_best(wanted, s, work);
    for (size_t i = 1; i < decoders.size(); ++i) {
      std::string what = " of the decoder on " + std::to_string(i + 1) + " threads";
      Outcome got = run(decoders[i], s, work, kv, format, kind);
      require_equal(got.logits, wanted.logits, "logits" + what);
      require_equal(got.best, wanted.best, "tokens" + what);
      require_equal(got.kv, wanted.kv, "cells" + what);
    }
    kv = std::move(wanted.kv);
  }
  for (hwk_decoder* each : decoders) hwk_decoder_destroy(each);
}

}  // namespace check
