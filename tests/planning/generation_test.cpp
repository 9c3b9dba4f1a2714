// The time of generation against closed formulas, on machines that have one limit each.
#include "planning/generation.h"

#include <gtest/gtest.h>

#include "models/gpt_config.h"
#include "support/expect_error.h"

namespace sherd::planning {
namespace {

constexpr std::int64_t width = 512, blocks = 4, ids_known = 1024, kv_heads = 2, head = 64, prompt = 128,
                       more = 33, texts = 4;

config::Config small_llama() {
  return config::parse_text(
      cat(R"({"bf16": {"enabled": true}, "train_batch_size": 1, "model": {"type": "llama", "hidden_size": )",
          width, R"(, "num_layers": )", blocks, R"(, "num_heads": 8, "num_kv_heads": )", kv_heads,
          R"(, "ffn_hidden_size": 1024, "seq_length": 512, "vocab_size": )", ids_known,
          R"(, "tie_embeddings": false}})"));
}
/// Elements of a block's products: of queries, keys and values, of attention's output, and of the
/// gated MLP.
constexpr double block_elements = width * (width + 2 * kv_heads * head) + width * width + 3 * width * 1024;

/// Whatever is not said takes no time.
config::Machine one_limit(double peak, double bandwidth, double link = 1e30) {
  config::Machine out;
  out.name = "one limit", out.devices = 8, out.memory = std::uint64_t{1} << 40;
  config::DeviceRates rates;
  rates.products = {{.dtype = DType::bf16, .peak = peak, .attention = {.forward = 1, .backward = 1}}};
  rates.bandwidth = bandwidth;
  out.rates = {rates};
  out.links = {{.name = "near", .bandwidth = link}};
  return out;
}

GenerationTime time_of(const config::Machine& machine, int tensor = 1, std::int64_t batch = texts) {
  return generation_time(small_llama(), machine, ids_known, tensor,
                         {.batch = batch, .prompt = prompt, .tokens = more});
}

TEST(Generation, ReadsPromptsByTheirFlops) {
  constexpr double peak = 1e12;
  const double products =
      2.0 * texts *
      (prompt * blocks * block_elements + width * ids_known);  // the head sees the last position alone
  const double scores =
      4.0 * texts * blocks * width * prompt * (prompt + 1) / 2;  // two products of causal pairs
  EXPECT_NEAR(time_of(one_limit(peak, 1e30)).prefill, (products + scores) / peak, 0.01 * products / peak);
}

/// Each token reads all weights once and the keys and values of its text, whose length is the mean here.
TEST(Generation, MakesTokensByTheBytesOfWeightsAndKeys) {
  constexpr double bandwidth = 1e10;
  const double weights = 2.0 * (blocks * block_elements + width * ids_known);
  const double keys = 2.0 * texts * blocks * 2 * kv_heads * head * (prompt + 1 + (more - 1) / 2);
  const GenerationTime time = time_of(one_limit(1e30, bandwidth));
  EXPECT_GT(time.decode, (weights + keys) / bandwidth);
  EXPECT_LT(time.decode, 1.15 * (weights + keys) / bandwidth) << "activations of a few rows are little";
  EXPECT_NEAR(time.tokens_per_second, texts * more / (time.prefill + (more - 1) * time.decode), 1e-6);
}

TEST(Generation, HoldsWeightsAndKeys) {
  const GenerationTime time = time_of(one_limit(1e12, 1e12));
  const double keys = 2.0 * texts * blocks * 2 * kv_heads * head * (prompt + more - 1);
  const models::GptConfig shape = models::gpt_config(small_llama(), ids_known);
  EXPECT_EQ(static_cast<double>(time.memory), 2.0 * static_cast<double>(shape.num_parameters()) + keys);
  EXPECT_TRUE(time.fits);
  config::Machine small = one_limit(1e12, 1e12);
  small.memory = time.memory - 1;
  EXPECT_FALSE(time_of(small).fits);
}

/// Tensor ranks sum the stream twice a block (Shoeybi et al. 2019), and share the rest.
TEST(Generation, TensorRanksExchangeTheStream) {
  constexpr double link = 1e6;
  const GenerationTime two = time_of(one_limit(1e30, 1e30, link), 2);
  const double stream =
      2.0 * texts * width;  // bytes of one row of each text; a ring sends all of it once in each half
  const double sums = blocks * 2 * 2 * stream / 2;
  EXPECT_GE(two.decode, sums / link);
  // The vocabulary's parts, once: their sums and logits.
  EXPECT_LE(two.decode, (sums + 2 * stream + 4.0 * texts * ids_known) / link);
  EXPECT_NEAR(time_of(one_limit(1e12, 1e30), 2).prefill, time_of(one_limit(1e12, 1e30)).prefill / 2,
              0.01 * time_of(one_limit(1e12, 1e30)).prefill);
  EXPECT_EQ(tensor_ranks(small_llama(), one_limit(1, 1), ids_known), (std::vector<int>{1, 2, 4, 8}));
}

TEST(Generation, ManyPromptsAreReadInTurn) {
  const GenerationTime few = time_of(one_limit(1e12, 1e30), 1, 32),
                       many = time_of(one_limit(1e12, 1e30), 1, 80);
  EXPECT_NEAR(many.prefill, 2.5 * few.prefill, 1e-3 * many.prefill);
  // 4096 rows at a time: 32 texts of 128 tokens, so 96 texts take three passes, each of as many kernels.
  config::Machine slow = one_limit(1e30, 1e30);
  slow.rates[0].latency = 1;
  EXPECT_NEAR(time_of(slow, 1, 96).prefill, 3 * time_of(slow, 1, 32).prefill, 1e-6);
}

TEST(Generation, TextsEndWithTheModelsPositions) {
  sherd::testing::expect_error(ErrorKind::config, "longer than the model's 512 positions", [] {
    generation_time(small_llama(), one_limit(1, 1), ids_known, 1, {.batch = 1, .prompt = 500, .tokens = 14});
  });
  EXPECT_GT(
      generation_time(small_llama(), one_limit(1, 1), ids_known, 1, {.batch = 1, .prompt = 500, .tokens = 13})
          .decode,
      0);
}

}  // namespace
}  // namespace sherd::planning
