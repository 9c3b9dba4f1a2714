// Documents that share a row and do not see each other: the loss and the gradients of each alone.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "autograd/key_cache.h"
#include "autograd/ops.h"
#include "models/gpt.h"
#include "support/expect_error.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using tensor::Tensor;
using testing::expect_error;

/// Lengths of the documents of two rows.
const std::vector<std::vector<std::int64_t>> rows{{3, 1, 2}, {4, 2}};
constexpr std::int64_t seq = 6;

class DocumentsTest : public ::testing::Test {
 protected:
  tensor::Batch packed(std::uint64_t seed, std::int64_t vocabulary) {
    tensor::Batch batch{{"tokens", cpu_.ids({2, seq}, seed, static_cast<std::int32_t>(vocabulary))},
                        {"labels", cpu_.ids({2, seq}, seed + 1, static_cast<std::int32_t>(vocabulary))}};
    batch["labels"].data<std::int32_t>()[1] = -100;
    std::vector<std::int32_t> bounds{0}, positions;
    for (const auto& row : rows)
      for (const std::int64_t length : row) {
        bounds.push_back(bounds.back() + static_cast<std::int32_t>(length));
        for (std::int32_t i = 0; i < length; ++i) positions.push_back(i);
      }
    batch["documents"] =
        Tensor::of<std::int32_t>(*cpu_.device, {static_cast<std::int64_t>(bounds.size())}, bounds);
    batch["positions"] = Tensor::of<std::int32_t>(*cpu_.device, {2, seq}, positions);
    return batch;
  }
  /// The documents' batches, one of each.
  static std::vector<tensor::Batch> alone(const tensor::Batch& batch) {
    std::vector<tensor::Batch> out;
    std::int64_t begin = 0;
    for (const auto& row : rows)
      for (const std::int64_t length : row) {
        out.push_back({{"tokens", batch.at("tokens").range(begin, begin + length).reshape({1, length})},
                       {"labels", batch.at("labels").range(begin, begin + length).reshape({1, length})}});
        begin += length;
      }
    return out;
  }
  static std::int64_t targets(const tensor::Batch& batch) {
    const Tensor& labels = batch.at("labels");
    const auto* ids = labels.data<std::int32_t>();
    return labels.numel() - std::count(ids, ids + labels.numel(), -100);
  }
  test::Cpu cpu_;
};

TEST_F(DocumentsTest, HaveTheLossesAndGradientsOfEachAlone) {
  GptConfig norms = test::tiny_llama();
  norms.qk_norm = true, norms.sliding_window = 2;
  for (const GptConfig& options :
       {test::tiny_gpt2(), test::tiny_llama(), norms, test::tiny_latents(), test::tiny_hybrid()})
    for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      Gpt model(options);
      test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
      autograd::Tape tape(*cpu_.kernels);
      tape.recompute = recompute;
      const tensor::Batch batch = packed(3, options.vocab_size);
      double sum = 0;
      std::map<std::string, std::vector<double>> gradients;
      for (const tensor::Batch& document : alone(batch)) {
        const auto weight = static_cast<double>(targets(document));
        if (weight == 0) continue;
        parameters.zero_grad();
        const autograd::Var loss = model(tape, document);
        sum += weight * tensor::scalar_value(loss.value());
        tape.backward(loss, weight);
        for (const auto& p : parameters.all()) {
          const auto own = cpu_.values(p->grad);
          auto& all = gradients[p->name];
          all.resize(own.size());
          for (std::size_t i = 0; i < own.size() && p->grad_written; ++i) all[i] += own[i];
        }
      }
      parameters.zero_grad();
      const autograd::Var loss = model(tape, batch);
      const auto weight = static_cast<double>(targets(batch));
      EXPECT_NEAR(weight * tensor::scalar_value(loss.value()), sum, 1e-10);
      tape.backward(loss, weight);
      for (const auto& p : parameters.all()) {
        const auto got = cpu_.values(p->grad);
        for (std::size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(got[i], gradients[p->name][i], 1e-9) << p->name << ' ' << i;
      }
      // And these are others than those of rows in which all see all.
      tensor::Batch joined = batch;
      joined.erase("documents");
      EXPECT_GT(std::abs(tensor::scalar_value(model(tape, joined).value()) * weight - sum), 1e-3);
    }
}

TEST_F(DocumentsTest, DrawDropoutOfTheirOwn) {
  tensor::Attention geometry{.heads = 2, .kv_heads = 2, .dropout = 0.5f, .key = {1, 2}};
  geometry.documents = std::make_shared<const autograd::Documents>(autograd::Documents{0, 4, 8, 12, 16});
  const Tensor qkv = cpu_.normal({2, 8, 24}, 1, DType::f32);
  // Both rows hold the same, and so do the documents of a row.
  const Tensor first = qkv.range(0, 4 * 24);
  for (int i = 1; i < 4; ++i) cpu_.kernels->copy(first, qkv.range(i * 4 * 24, (i + 1) * 4 * 24));
  autograd::Tape tape(*cpu_.kernels);
  const auto out = cpu_.values(autograd::attention(tape.input(qkv), geometry).value());
  std::set<std::vector<double>> masks;
  for (std::size_t i = 0; i < 4; ++i)
    masks.emplace(out.begin() + static_cast<long>(i) * 32, out.begin() + static_cast<long>(i + 1) * 32);
  EXPECT_EQ(masks.size(), 4u);
}

TEST_F(DocumentsTest, AreNotForKeyCaches) {
  autograd::Tape tape(*cpu_.kernels);
  const autograd::Tape::NoGrad pause(tape);
  autograd::KeyCache cache(1, 4);
  tape.key_cache = &cache;
  cache.begin(*cpu_.device, {{0, 0, 4}}, 4);
  const autograd::Var qkv = tape.input(cpu_.normal({1, 4, 6}, 1, DType::f32));
  tensor::Attention geometry{.heads = 1};
  geometry.documents = std::make_shared<const autograd::Documents>(autograd::Documents{0, 4});
  expect_error(ErrorKind::usage, "knows no documents", [&] { autograd::attention(qkv, geometry); });
}

TEST_F(DocumentsTest, RefuseBoundsThatAreNone) {
  autograd::Tape tape(*cpu_.kernels);
  const autograd::Var qkv = tape.input(cpu_.normal({2, 4, 6}, 1, DType::f32));
  const auto attend = [&](autograd::Documents bounds) {
    tensor::Attention geometry{.heads = 1, .kv_heads = 1};
    geometry.documents = std::make_shared<const autograd::Documents>(std::move(bounds));
    autograd::attention(qkv, geometry);
  };
  expect_error(ErrorKind::usage, "do not go from 0 to 8 rows", [&] { attend({0, 4}); });
  expect_error(ErrorKind::usage, "do not go from 0 to 8 rows", [&] { attend({}); });
  expect_error(ErrorKind::usage, "the rows 3 to 5 is not within a sequence of 4", [&] {
    attend({0, 3, 5, 8});
  });
  expect_error(ErrorKind::usage, "is not within", [&] { attend({0, 4, 2, 8}); });
}

}  // namespace
}  // namespace sherd::models
