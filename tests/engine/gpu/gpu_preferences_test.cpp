// Preferences on a GPU: losses, norms and scores are those of a processor to rounding, with a reference that
// is the model without its adapter, and rewards.
#include <gtest/gtest.h>

#include "engine/preference/preference_run.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/gpu/gpu.h"

namespace sherd::test {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int32_t few_ids = 97, length = 64;

/// Two pairs in a row, whose texts do not see each other, and filling.
tensor::Batch pairs_on(device::Device& device, bool rewards) {
  Ids tokens, labels(length, -100), sides{1, -1, 1, -1, 0}, documents{0}, positions, targets;
  for (std::int32_t text = 0; text < 4; ++text) {
    const std::int32_t places = 9 + 3 * text;
    for (std::int32_t i = 0; i < places; ++i) {
      const auto at = static_cast<std::int32_t>(tokens.size());
      tokens.push_back((text * 31 + i * i * 7 + 5) % few_ids), positions.push_back(i);
      if (rewards ? i + 1 < places : i < 4) continue;
      labels[static_cast<std::size_t>(at)] = (text * 17 + i * 5) % few_ids, targets.push_back(at);
    }
    documents.push_back(static_cast<std::int32_t>(tokens.size()));
  }
  const auto filling = static_cast<std::int32_t>(length - std::ssize(tokens));
  for (std::int32_t i = 0; std::ssize(tokens) < length; ++i) tokens.push_back(0), positions.push_back(i);
  documents.push_back(length);
  const auto row = [&](const Ids& values) {
    return tensor::Tensor::of<std::int32_t>(device, {1, length}, values);
  };
  const auto list = [&](const Ids& values) {
    const auto out =
        tensor::Tensor::on_host(device, {std::ssize(values)}, DType::i32, device::Category::activations);
    std::copy(values.begin(), values.end(), out.data<std::int32_t>());
    return out;
  };
  return {{"tokens", row(tokens)},      {"labels", row(labels)},     {"positions", row(positions)},
          {"sides", list(sides)},       {"targets", list(targets)},  {"documents", list(documents)},
          {"filling", list({filling})}, {"target_tokens", list({2})}};
}

struct Course {
  std::vector<double> losses, norms, scores;
};

Course train_on(const char* type, const std::string& objective, const std::string& more) {
  const config::Config config = config::parse_text(cat(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
          "data": {"path": "none", "packing": "documents"}, "device": {"type": ")",
      type, R"("}, "training": {"objective": ")", objective, "\"", more, R"(},
          "model": {"type": "llama", "vocab_size": 97, "seq_length": 64, "hidden_size": 32, "num_layers": 2,
                    "num_heads": 4, "init_std": 0.2, "head": ")",
      objective == "reward" ? "reward" : "lm", R"("}})"));
  Course out;
  launch_ranks(1, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(config, few_ids)), config);
    engine::PreferenceRun run(engine, nullptr);
    for (int step = 0; step < 3; ++step) {
      const bool rewards = objective == "reward";
      engine.train_batch(run.begin_step([&] { return pairs_on(engine.device(), rewards); }));
      out.losses.push_back(engine.last_step().loss), out.norms.push_back(engine.last_step().grad_norm);
      for (const auto& [name, value] : run.end_step()) out.scores.push_back(value);
    }
  });
  return out;
}

void expect_alike(const std::vector<double>& got, const std::vector<double>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 2e-4 * std::max(0.01, std::abs(want[i]))) << what << ' ' << i;
}

TEST(GpuPreferences, are_those_of_a_processor) {
  SHERD_NEEDS_GPU();
  const std::string adapter = R"(, "adapter": {"type": "lora", "targets": "all-linear", "rank": 4})",
                    free = R"(, "preference": {"reference": "none", "ld_alpha": 0.5, "rpo_alpha": 0.3})";
  for (const auto& [objective, more] :
       {std::pair<std::string, std::string>{"dpo", adapter}, {"dpo", free}, {"orpo", ""}, {"reward", ""}}) {
    SCOPED_TRACE(objective + more);
    const Course gpu = train_on("cuda", objective, more), processor = train_on("cpu", objective, more);
    ASSERT_NE(processor.losses.front(), processor.losses.back());
    expect_alike(gpu.losses, processor.losses, "loss");
    expect_alike(gpu.norms, processor.norms, "norm");
    expect_alike(gpu.scores, processor.scores, "metric");
  }
}

}  // namespace
}  // namespace sherd::test
