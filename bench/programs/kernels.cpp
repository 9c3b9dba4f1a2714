// Times the kernels of one device at a GPT's shapes (GPT-2 small on the processor, 1.3 billion parameters on
// a GPU): those that move memory beside a copy of as many bytes, in alternating rounds of one process, the
// products by themselves. Prints JSON lines, the best round of each, and with --summary lines "name:
// figures".
//
// With one thread of the processor its CPU time is taken, which other processes disturb less.
#include <array>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "base/arena.h"
#include "base/cpu_isa.h"
#include "bench/programs/kernel_rounds.h"
#include "bench/programs/options.h"
#include "tensor/formats/stored_format.h"
#include "tensor/kernels.h"

namespace {

using namespace sherd;
using namespace sherd::tensor;
using bench::KernelRounds;

class KernelCases {
 public:
  explicit KernelCases(KernelRounds& rounds) : r_(rounds), k_(rounds.kernels()) {
    if (rounds.cuda())
      tokens_ = 16384, seq_ = 2048, width_ = 2048, heads_ = 16, vocab_ = 50304, many_ = 256 << 20;
    fast_ = make_kernels(rounds.device(), {.tf32 = true, .deterministic_attention = false});
  }

  void run() {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      elementwise(dtype);
      rows(dtype);
      loss(dtype);
      sharding(dtype);
      if (r_.cuda()) products(dtype);  // the processor's: `sherd bench gemm`
      if (!r_.cuda() || dtype == DType::bf16) attention(dtype);
    }
    movement();
  }

 private:
  void elementwise(DType dtype) {
    const Tensor x = r_.make({tokens_, 4 * width_}, dtype), dy = r_.make({tokens_, 4 * width_}, dtype),
                 y = r_.make({tokens_, 4 * width_}, dtype);
    const Tensor narrow = r_.make({tokens_, 2 * width_}, dtype);
    const RandomKey key{5, 6};
    r_.measure({"add", {x, dy}, {y}, [&] { k_.add(x, dy, y); }}, dtype);
    r_.measure({"scale", {x}, {y}, [&] { k_.scale(x, 0.5, y); }}, dtype);
    for (const auto& [kind, name] :
         {std::pair{Activation::gelu_tanh, "gelu_tanh"}, {Activation::gelu_erf, "gelu_erf"}}) {
      r_.measure({name, {x}, {y}, [&, kind = kind] { k_.activation(kind, x, y); }}, dtype);
      r_.measure({std::string(name) + "_backward",
                  {x, dy},
                  {y},
                  [&, kind = kind] { k_.activation_backward(kind, x, dy, y); }},
                 dtype);
    }
    r_.measure({"tanh", {x}, {y}, [&] { k_.tanh(x, y); }}, dtype);
    r_.measure({"relu", {x}, {y}, [&] { k_.relu(x, y); }}, dtype);
    r_.measure({"glu", {x}, {narrow}, [&] { k_.glu(Glu::swiglu, x, narrow); }}, dtype);
    r_.measure({"glu_backward", {x, narrow}, {y}, [&] { k_.glu_backward(Glu::swiglu, x, narrow, y); }},
               dtype);
    const Tensor h = r_.make({tokens_, width_}, dtype), r = r_.make({tokens_, width_}, dtype),
                 o = r_.make({tokens_, width_}, dtype);
    r_.measure({"dropout_residual", {h, r}, {o}, [&] { k_.dropout(h, r, 0.1f, key, o); }}, dtype);
    r_.measure({"dropout_backward", {h}, {o}, [&] { k_.dropout_backward(h, 0.1f, key, o); }}, dtype);
  }

  void rows(DType dtype) {
    const Tensor x = r_.make({tokens_ / seq_, seq_, width_}, dtype),
                 dy = r_.make({tokens_ / seq_, seq_, width_}, dtype),
                 y = r_.make({tokens_ / seq_, seq_, width_}, dtype);
    const Tensor w = r_.make({width_}, dtype), b = r_.make({width_}, dtype), dw = r_.make({width_}, dtype),
                 db = r_.make({width_}, dtype);
    const Tensor mean = r_.make({tokens_}, DType::f32), rstd = r_.make({tokens_}, DType::f32);
    r_.measure({"layer_norm", {x}, {y}, [&] { k_.layer_norm(x, w, b, 1e-5, y, mean, rstd); }}, dtype);
    r_.measure({"layer_norm_backward",
                {x, dy},
                {y},
                [&] { k_.layer_norm_backward(x, w, mean, rstd, dy, y, dw, db, false); }},
               dtype);
    r_.measure({"rms_norm", {x}, {y}, [&] { k_.rms_norm(x, w, 1e-5, y, rstd); }}, dtype);
    r_.measure(
        {"rms_norm_backward", {x, dy}, {y}, [&] { k_.rms_norm_backward(x, w, rstd, dy, y, dw, false); }},
        dtype);
    const Tensor table = r_.make({vocab_, width_}, dtype),
                 token = r_.ids(tokens_, static_cast<std::int32_t>(vocab_)),
                 positions = r_.make({2 * seq_, width_}, dtype);
    r_.measure({"embedding", {x}, {y}, [&] { k_.embedding(token, table, y); }}, dtype);
    r_.measure({"embedding_backward", {dy}, {table}, [&] { k_.embedding_backward(token, dy, table, false); }},
               dtype);
    r_.measure({"embedding_backward_accumulate",
                {dy, dy},
                {dy},
                [&] { k_.embedding_backward(token, dy, table, true); }},
               dtype);
    r_.measure({"add_positions", {x}, {y}, [&] { k_.add_positions(x, positions, y); }}, dtype);
    r_.measure({"add_positions_backward",
                {dy},
                {positions},
                [&] { k_.add_positions_backward(dy, positions, false); }},
               dtype);
    const Tensor qkv = r_.make({tokens_ / seq_, seq_, 3 * width_}, dtype),
                 rotated = r_.make({tokens_ / seq_, seq_, 3 * width_}, dtype);
    Attention geometry;
    geometry.heads = geometry.kv_heads = heads_;
    r_.measure({"rotary", {qkv}, {rotated}, [&] { k_.rotary(qkv, geometry, {}, false, rotated); }}, dtype);
  }

  void loss(DType dtype) {
    const Tensor logits = r_.make({tokens_, vocab_}, dtype),
                 targets = r_.ids(tokens_, static_cast<std::int32_t>(vocab_)),
                 lse = r_.make({tokens_}, DType::f32);
    const Tensor picked = r_.make({tokens_}, DType::f32), total = r_.make({2}, DType::f64),
                 factor = r_.make({1}, DType::f32);
    r_.measure({"cross_entropy",
                {logits},
                {},
                [&] { k_.cross_entropy(logits, targets, {}, -100, lse, picked, {}); }},
               dtype);
    k_.cross_entropy(logits, targets, {}, -100, lse, picked, {});
    r_.measure({"cross_entropy_total",
                {lse, picked},
                {},
                [&] { k_.cross_entropy_total(lse, picked, targets, -100, lse, total, false); }},
               dtype);
    r_.measure({"cross_entropy_backward",
                {logits},
                {logits},
                [&] { k_.cross_entropy_backward(logits, targets, lse, {}, -100, factor); }},
               dtype);
  }

  void sharding(DType dtype) {
    const std::int64_t n = many_;
    const Tensor from = r_.make({n}, dtype), out = r_.make({n}, dtype), wide = r_.make({n}, DType::f32);
    r_.measure({"fold", {from}, {out}, [&] { k_.fold(from, dtype, out, false); }}, dtype);
    r_.measure({"fold_onto_fp32", {from, wide}, {wide}, [&] { k_.fold(from, dtype, wide, true); }}, dtype);
    ExactSum sum;
    r_.measure({"sum_of_squares", {out}, {}, [&] { k_.sum_of_squares(out, sum); }}, dtype);
    r_.measure({"fill", {}, {out}, [&] { k_.fill(out, 0); }}, dtype);
    const Tensor small = r_.make({1 << 20}, dtype);
    r_.measure({"fill_normal_1m", {}, {small}, [&] { k_.fill_normal(small, {1, 2}, 0, 0, 0.02); }}, dtype);
    r_.measure({"fill_uniform_1m", {}, {small}, [&] { k_.fill_uniform(small, {1, 2}, 0, 0, 1); }}, dtype);
    const Tensor other = r_.make({n}, dtype), loss_value = r_.make({1}, DType::f32);
    r_.measure(
        {"mean_squared_error", {out, other}, {}, [&] { k_.mean_squared_error(out, other, loss_value); }},
        dtype);
  }

  void movement() {
    const std::int64_t n = many_;
    for (const auto& [a, b] : {std::pair{DType::f32, DType::bf16}, {DType::f32, DType::f16}}) {
      const Tensor x = r_.make({n}, a), y = r_.make({n}, b);
      const std::string pair = std::string(name_of(a)) + "_" + std::string(name_of(b));
      r_.measure({"copy_narrow_" + pair, {x}, {y}, [&] { k_.copy(x, y); }}, b);
      r_.measure({"copy_widen_" + pair, {y}, {x}, [&] { k_.copy(y, x); }}, b);
    }
    const Tensor x = r_.make({n}, DType::f32), y = r_.make({n}, DType::f32);
    r_.measure({"copy_same", {x}, {y}, [&] { k_.copy(x, y); }}, DType::f32);
    if (!r_.cuda()) return;
    const Tensor host = r_.make({n}, DType::f32, device::Tier::host);
    r_.measure({"copy_from_host", {host}, {}, [&] { k_.copy(host, x); }}, DType::f32);
    r_.measure({"copy_to_host", {x}, {}, [&] { k_.copy(x, host); }}, DType::f32);
  }

  void products(DType dtype) {
    const auto product = [&](const char* name, std::int64_t m, std::int64_t n, std::int64_t k, bool ta,
                             bool tb, Kernels& kernels) {
      if (!r_.wanted(name, dtype)) return;
      const Matmul args{.a = r_.make(ta ? Shape{k, m} : Shape{m, k}, dtype),
                        .b = r_.make(tb ? Shape{n, k} : Shape{k, n}, dtype),
                        .c = r_.make({m, n}, dtype),
                        .trans_a = ta,
                        .trans_b = tb};
      r_.measure_products(name, dtype,
                          2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
                          [&] { kernels.matmul(args); });
    };
    product("up_forward", tokens_, 4 * width_, width_, false, true, k_);
    product("up_dx", tokens_, width_, 4 * width_, false, false, k_);
    product("up_dw", 4 * width_, width_, tokens_, true, false, k_);
    product("projection_forward", tokens_, width_, width_, false, true, k_);
    product("head_forward", tokens_, vocab_, width_, false, true, k_);
    if (dtype == DType::f32) product("up_forward_tf32", tokens_, 4 * width_, width_, false, true, *fast_);
  }

  /// A call's geometry, named as its cases are.
  struct AttentionCase {
    std::string name;
    std::int64_t batch, seq;
    int heads;
    std::int64_t window = 0, document = 0;  ///< rows of each document; 0: whole sequences
    float dropout = 0;
    int shared_by = 1;  ///< query heads that share a key head
  };

  void attention(DType dtype) {
    attention(dtype, {"attention", tokens_ / seq_, seq_, heads_});
    attention(dtype, {"attention_4096", 1, 4096, 2});
    attention(dtype, {"attention_4096_window_512", 1, 4096, 2, 512});
    const std::int64_t batch = tokens_ / seq_;
    attention(dtype,
              {.name = "attention_grouped", .batch = batch, .seq = seq_, .heads = heads_, .shared_by = 4});
    attention(dtype,
              {.name = "attention_dropout", .batch = batch, .seq = seq_, .heads = heads_, .dropout = 0.1f});
    attention(
        dtype,
        {.name = "attention_documents", .batch = batch, .seq = seq_, .heads = heads_, .document = seq_ / 4});
    decode(dtype);
  }

  /// A weight's numbers, some thousands of them again and again.
  Tensor blocks_of(StoredFormat format, std::int64_t count) const {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 0.02f);
    std::vector<float> values(16384);
    for (float& value : values) value = normal(random);
    Arena arena(1);
    std::vector<std::byte> part(static_cast<std::size_t>(stored_bytes(format, std::ssize(values))));
    if (!quantize(format, values, part.data(), arena)) throw std::runtime_error("no blocks of such values");
    std::vector<std::uint8_t> all(static_cast<std::size_t>(stored_bytes(format, count)));
    for (std::size_t at = 0; at < all.size(); at += part.size())
      std::memcpy(all.data() + at, part.data(), std::min(part.size(), all.size() - at));
    return Tensor::of<std::uint8_t>(r_.device(), {std::ssize(all)}, all);
  }

  /// 8B Llama's down projection in few bits: its values, which no cache holds, and its product with a token's
  /// row, beside that of the values as they lie.
  void stored_weight(DType dtype) {
    constexpr std::int64_t n = 4096, k = 14336;
    const tensor::Matmul token{.a = r_.make({1, k}, dtype),
                               .b = r_.make({n, k}, dtype),
                               .c = r_.make({1, n}, dtype),
                               .trans_b = true,
                               .few_rows = true};
    r_.measure({"token_product", {token.b}, {}, [&] { k_.matmul(token); }}, dtype);
    for (const StoredFormat format : {StoredFormat::int8, StoredFormat::nf4, StoredFormat::nf4_double,
                                      StoredFormat::mxfp4, StoredFormat::fp8}) {
      const Tensor blocks = blocks_of(format, n * k);
      const std::string name(name_of(format));
      r_.measure({"dequantize_" + name, {blocks}, {token.b}, [&] { k_.dequantize(format, blocks, token.b); }},
                 dtype);
      if (!k_.multiplies_stored()) continue;
      Matmul by_blocks = token;
      by_blocks.b = {};
      by_blocks.stored_b = {blocks, format, n, k};
      r_.measure({"token_product_" + name, {blocks}, {}, [&] { k_.matmul(by_blocks); }}, dtype);
    }
  }

  /// A token of one text of 4096, with 8B Llama's heads.
  void decode(DType dtype) {
    stored_weight(dtype);
    constexpr std::int64_t heads = 32, kv_heads = 8, dim = 128, keys = 4096;
    const Tensor qkv = r_.make({1, 1, (heads + 2 * kv_heads) * dim}, dtype);
    const Tensor stored[2] = {r_.make({1, kv_heads, keys, dim}, dtype),
                              r_.make({1, kv_heads, keys, dim}, dtype)};
    const Tensor out = r_.make({1, 1, heads * dim}, dtype);
    const Tensor places =
        Tensor::of<std::int32_t>(r_.device(), {1, 3}, std::array<std::int32_t, 3>{0, keys - 1, 1});
    const tensor::Attention geometry{.heads = heads, .kv_heads = kv_heads, .key = {}};
    r_.measure({"attend_stored_4096",
                {stored[0], stored[1]},
                {out},
                [&] {
                  k_.attend_stored(qkv, geometry, {stored[0], stored[1], places}, {}, out);
                }},
               dtype);
  }

  void attention(DType dtype, const AttentionCase& c) {
    const std::string forward = c.name + "_forward", backward = c.name + "_backward",
                      fast = backward + "_fast";
    if (!r_.wanted(forward, dtype) && !r_.wanted(backward, dtype) && !r_.wanted(fast, dtype)) return;
    const std::int64_t dim = width_ / heads_;
    const int kv_heads = c.heads / c.shared_by;
    tensor::Attention geometry{
        .heads = c.heads, .kv_heads = kv_heads, .window = c.window, .dropout = c.dropout, .key = {1, 2}};
    if (c.document > 0) {
      tensor::Documents bounds;
      for (std::int64_t row = 0; row <= c.batch * c.seq; row += c.document) bounds.push_back(row);
      geometry.documents = std::make_shared<const tensor::Documents>(std::move(bounds));
    }
    const Tensor qkv = r_.make({c.batch, c.seq, (c.heads + 2 * kv_heads) * dim}, dtype),
                 dout = r_.make({c.batch, c.seq, c.heads * dim}, dtype);
    const Tensor out = r_.make(dout.shape(), dtype), dqkv = r_.make(qkv.shape(), dtype);
    const Tensor lse = r_.make({c.batch, c.heads, c.seq}, DType::f32);
    // The part of two products, and of five, that the mask leaves: keys by query.
    const std::int64_t length = c.document ? c.document : c.seq, window = c.window ? c.window : length;
    const std::int64_t seen = c.seq / length * (window * (window + 1) / 2 + (length - window) * window);
    const auto product = static_cast<double>(2 * c.batch * c.heads * seen * dim);
    k_.attention(qkv, geometry, out, lse);  // the backward pass reads its result
    r_.measure_products(forward, dtype, 2 * product, [&] { k_.attention(qkv, geometry, out, lse); });
    r_.measure_products(backward, dtype, 5 * product,
                        [&] { k_.attention_backward(qkv, geometry, out, lse, dout, dqkv); });
    r_.measure_products(fast, dtype, 5 * product,
                        [&] { fast_->attention_backward(qkv, geometry, out, lse, dout, dqkv); });
  }

  KernelRounds& r_;
  Kernels& k_;
  /// Kernels with what a configuration can trade for speed: TF32, attention's atomics.
  std::unique_ptr<Kernels> fast_;
  std::int64_t tokens_ = 2048, seq_ = 512, width_ = 768, vocab_ = 50257, many_ = 12 << 20;
  int heads_ = 12;
};

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_kernels", [&] {
    bench::KernelRoundsOptions options;
    options.threads = available_cores();
    bool summary = false;
    std::vector<std::string> filters;
    bench::Options("bench_kernels", "[--device cpu|cuda] [--threads N] [--rounds 15] [--summary] [FILTER]")
        .value("device",
               [&](const std::string& text) {
                 require(text == "cpu" || text == "cuda", "--device takes cpu or cuda, not '", text, "'");
                 options.cuda = text == "cuda";
               })
        .value("threads", options.threads)
        .value("rounds", options.rounds)
        .flag("summary", summary)
        .rest(filters)
        .parse(argc, argv);
    require(filters.size() <= 1, "one FILTER is taken, not ", filters.size());
    if (!filters.empty()) options.filter = filters.front();
    std::printf("{\"isa\": \"%s\", \"threads\": %d, \"rounds\": %d, \"device\": \"%s\"}\n",
                std::string(name_of(cpu_isa())).c_str(), options.threads, options.rounds,
                options.cuda ? "cuda" : "cpu");
    KernelRounds rounds(options);
    KernelCases(rounds).run();
    if (summary) rounds.print_summary();
  });
}
