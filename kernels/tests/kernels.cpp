// Every kernel of the C interface on random shapes: the same bits from 1, 2 and 3 threads.
#include "check.h"

namespace check {
namespace {

// compute(context) on each context must return the same.
template <class Compute>
void same(const Contexts& contexts, const std::string& what, Compute compute) {
  auto wanted = compute(contexts.all[0]);
  for (size_t i = 1; i < contexts.all.size(); ++i)
    require_equal(compute(contexts.all[i]), wanted, what + " on " + std::to_string(i + 1) + " threads");
}

void matrices(const Contexts& contexts, Random& random, int32_t format) {
  int64_t rows = random.one_of({1, 2, 3, 5, 8, 13, 40, 150}), in = random.between(1, 200), out = random.between(1, 400);
  int64_t stride = in + random.upto(3);
  Blob w = random.matrix(format, out, in);
  Floats x = random.reals((rows - 1) * stride + in), bias = random.reals(out);
  const float* bias_at = random.upto(1) ? bias.data() : nullptr;
  std::string shape = " format " + std::to_string(format) + " [" + std::to_string(rows) + ", " + std::to_string(in) +
                      ", " + std::to_string(out) + "]";
  same(contexts, "gemm" + shape, [&](hwk_context* context) {
    Floats y(static_cast<size_t>(rows * out));
    int status = hwk_gemm(context, x.data(), rows, in, stride, w.data(), format, w.bytes, out, bias_at, y.data());
    require(status == 0, "gemm" + shape);
    return y;
  });
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < rows; ++i) ids.push_back(random.upto(out - 1));
  same(contexts, "embed" + shape, [&](hwk_context* context) {
    Floats y(static_cast<size_t>(rows * in));
    require(hwk_embed(context, w.data(), format, w.bytes, out, in, ids.data(), rows, y.data()) == 0, "embed" + shape);
    return y;
  });
}

void rows(const Contexts& contexts, Random& random) {
  int64_t count = random.between(1, 80), n = random.between(1, 700), heads = random.between(1, 3);
  int64_t stride = heads * n + random.upto(5);
  Floats x = random.reals((count - 1) * stride + heads * n), weight = random.reals(n);
  same(contexts, "rms_norm", [&](hwk_context* context) {
    Floats y(static_cast<size_t>(count * heads * n));
    hwk_rms_norm(context, x.data(), count, heads, n, stride, weight.data(), 1e-5f, y.data());
    return y;
  });
  Floats gate_up = random.reals(count * 2 * n);
  for (int32_t activation : {hwk::kSilu, hwk::kGelu})
    same(contexts, "gate_mul " + std::to_string(activation), [&](hwk_context* context) {
      Floats y(static_cast<size_t>(count * n));
      hwk_gate_mul(context, gate_up.data(), count, n, 2 * n, activation, y.data());
      return y;
    });
  Floats bias = random.reals(n);
  same(contexts, "layer_norm", [&](hwk_context* context) {
    Floats y(static_cast<size_t>(count * n));
    hwk_layer_norm(context, x.data(), count, n, stride, weight.data(), bias.data(), 1e-5f, y.data());
    return y;
  });
  same(contexts, "gelu", [&](hwk_context* context) {
    Floats y(gate_up.size());
    hwk_gelu(context, gate_up.data(), static_cast<int64_t>(gate_up.size()), y.data());
    return y;
  });
  same(contexts, "soft_cap", [&](hwk_context* context) {
    Floats y(gate_up.size());
    hwk_soft_cap(context, gate_up.data(), static_cast<int64_t>(gate_up.size()), 0.5f, y.data());
    return y;
  });
  same(contexts, "exp", [&](hwk_context* context) {
    Floats y(x.size());
    hwk_exp(context, x.data(), static_cast<int64_t>(x.size()), y.data());
    return y;
  });
}

// What an adapter of `format` numbers adds, in memory that ends where its last number does.
void adapted(const Contexts& contexts, Random& random, int32_t format) {
  const uint16_t halves[] = {0x0000, 0x3C00, 0x3800, 0xBC00};
  int64_t rows = random.between(1, 40), in = random.between(1, 200), out = random.between(1, 200);
  int64_t rank = hwk::kRankBlock * random.between(1, 6), stride = in + random.upto(3);
  int64_t size = format == hwk::kKvF32 ? 4 : format == hwk::kKvF16 ? 2 : 1;
  auto numbers = [&](int64_t count) {
    std::vector<uint8_t> bytes(static_cast<size_t>(count * size));
    Floats reals = random.reals(count);
    for (int64_t i = 0; i < count; ++i) {
      if (format == hwk::kKvF32) std::memcpy(bytes.data() + 4 * i, reals.data() + i, 4);
      if (format == hwk::kKvF16) std::memcpy(bytes.data() + 2 * i, halves + random.upto(3), 2);
      if (format == hwk::kKvI8) bytes[static_cast<size_t>(i)] = static_cast<uint8_t>(random.upto(255));
    }
    return bytes;
  };
  std::vector<uint8_t> shrink = numbers(rank * ((in + 15) / 16 * 16)), expand = numbers((out + 15) / 16 * 16 * rank);
  Floats x = random.reals((rows - 1) * stride + in), scales = random.reals(rank), before = random.reals(rows * out);
  same(contexts, "adapt format " + std::to_string(format), [&](hwk_context* context) {
    Floats y = before;
    int status = hwk_adapt(context, x.data(), rows, in, stride, shrink.data(), expand.data(), scales.data(), rank, format,
                           out, y.data(), out);
    require(status == 0, "adapt");
    return y;
  });
}

void rope(const Contexts& contexts, Random& random) {
  int64_t count = random.between(1, 80), dim = 2 * random.between(1, 70), heads = random.between(1, 9);
  int64_t kv_heads = random.between(1, 4), length = random.between(1, 50), stride = (heads + kv_heads) * dim;
  int64_t turned = 2 * random.between(1, dim / 2);
  Floats fused = random.reals(count * stride);
  Floats cos = random.reals(length * turned / 2), sin = random.reals(length * turned / 2);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < count; ++i) positions.push_back(random.upto(length - 1));
  same(contexts, "rope", [&](hwk_context* context) {
    Floats copy = fused;
    int status = hwk_rope(context, copy.data(), stride, heads, copy.data() + heads * dim, stride, kv_heads, dim,
                          turned, positions.data(), count, cos.data(), sin.data(), length);
    require(status == 0, "rope");
    return copy;
  });
}

void cells(const Contexts& contexts, Random& random, int32_t kv_format) {
  int64_t kv_heads = random.between(1, 4), group = random.between(1, 4), dim = 2 * random.between(1, 70);
  int64_t block_size = random.one_of({1, 8, 16, 64}), width = random.between(1, 160 / block_size + 1);
  int64_t num_tables = random.between(1, 5), num_blocks = num_tables * width + 1, num_cells = num_blocks * block_size;
  int64_t heads = kv_heads * group, record = hwk::kv_head_bytes(kv_format, dim);
  std::vector<int64_t> every;
  for (int64_t i = 0; i < num_cells; ++i) every.push_back(num_cells - 1 - i);
  Floats k = random.reals(num_cells * kv_heads * dim), v = random.reals(num_cells * kv_heads * dim);
  std::vector<uint8_t> kv(static_cast<size_t>(2 * num_cells * kv_heads * record));
  same(contexts, "write_kv format " + std::to_string(kv_format), [&](hwk_context* context) {
    kv.assign(kv.size(), 0xFF);
    int status = hwk_write_kv(context, k.data(), kv_heads * dim, v.data(), kv_heads * dim, num_cells, kv_heads, dim,
                              kv.data(), kv_format, num_cells, every.data());
    require(status == 0, "write_kv");
    return kv;
  });
  std::vector<int32_t> tables, row_of;
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < num_tables * width; ++i) tables.push_back(static_cast<int32_t>(random.upto(num_blocks - 1)));
  for (int64_t row = 0; row < num_tables; ++row) {
    int64_t first = random.upto(width * block_size - 1), last = random.between(first, width * block_size - 1);
    for (int64_t p = random.upto(2) ? last : first; p <= last; ++p) {
      row_of.push_back(static_cast<int32_t>(row));
      positions.push_back(p);
    }
  }
  auto count = static_cast<int64_t>(positions.size());
  Floats q = random.reals(count * heads * dim);
  int64_t window = random.upto(1) ? random.between(1, width * block_size) : 0;
  float cap = random.upto(1) ? 2.0f : 0.0f;
  same(contexts, "attention format " + std::to_string(kv_format), [&](hwk_context* context) {
    Floats y(q.size());
    int status = hwk_attention(context, q.data(), heads * dim, count, heads, kv_heads, dim, kv.data(), kv_format,
                               num_blocks, block_size, tables.data(), num_tables, width, row_of.data(),
                               positions.data(), 0.125f, window, cap, y.data());
    require(status == 0, "attention");
    return y;
  });
}

}  // namespace

void kernels(const Contexts& contexts, Random& random) {
  for (int32_t format : formats()) matrices(contexts, random, format);
  rows(contexts, random);
  rope(contexts, random);
  for (int32_t format : {hwk::kKvF32, hwk::kKvF16, hwk::kKvI8}) adapted(contexts, random, format);
  for (int32_t kv_format : {hwk::kKvF32, hwk::kKvF16, hwk::kKvI8}) cells(contexts, random, kv_format);
}

}  // namespace check

// drive ROUNDS SEED
int main(int argc, char** argv) {
  int rounds = argc > 1 ? std::atoi(argv[1]) : 10;
  auto seed = static_cast<uint32_t>(argc > 2 ? std::atoi(argv[2]) : 1);
  for (int level = 0; level <= hwk_best_level(); ++level) {
    check::Contexts contexts(level);
    check::Random random(seed);
    for (int round = 0; round < rounds; ++round) {
      check::kernels(contexts, random);
      check::decoder(contexts, random);
    }
    std::printf("level %d: %d rounds of seed %u\n", level, rounds, seed);
  }
  return 0;
}
