// Ranks that share a model, through the program: train, resume, generate, estimate and its advice.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class LayoutProgram : public Train {
 protected:
  static std::vector<std::string> with(std::vector<std::string> first, const std::vector<std::string>& more) {
    for (const std::string& key : more) first.push_back("--set"), first.push_back(key);
    return first;
  }
  std::vector<double> losses(const std::string& file) const {
    std::vector<double> out;
    for (const std::string& text : metric(file, "loss")) out.push_back(std::stod(text));
    return out;
  }
  std::string metrics(const std::string& file) const { return (folder_ / file).string(); }
};

TEST_F(LayoutProgram, TrainsAsDataRanksDo) {
  const std::string batch = "train_micro_batch_size_per_gpu=1", fp32 = "bf16.enabled=false";
  const auto run = [&](const std::string& ranks, const std::vector<std::string>& keys,
                       const std::string& file) {
    std::vector<std::string> all{batch, fp32, "training.save_dir="};
    all.insert(all.end(), keys.begin(), keys.end());
    const Outcome outcome = sherd(with(train({"--ranks", ranks, "--metrics", metrics(file)}), all));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome;
  };
  const Outcome plain = run("2", {}, "plain.jsonl");
  EXPECT_THAT(plain.err, Not(HasSubstr("tensor 1")));
  const Outcome shared = run("4", {"parallel.tensor=2"}, "shared.jsonl");
  EXPECT_THAT(shared.err, HasSubstr("over local(4), tensor 2 x context 1 x data 2, "));
  EXPECT_THAT(shared.err, HasSubstr("batch 4 = 1 per rank x 2 accumulated x 2 data-parallel ranks"));
  EXPECT_THAT(shared.out, HasSubstr("4 ranks, tensor 2 x context 1 x data 2\n"));
  EXPECT_THAT(shared.out, HasSubstr("of it, tensor group"));
  EXPECT_THAT(shared.out, HasSubstr("of it, shard group"));
  const Outcome context = run("2", {"sequence_parallel_size=2"}, "context.jsonl");
  EXPECT_THAT(context.err, HasSubstr("batch 4 = 1 per rank x 4 accumulated x 1 data-parallel rank"));
  const std::vector<double> expected = losses("plain.jsonl");
  ASSERT_EQ(expected.size(), 6u);
  for (const char* file : {"shared.jsonl", "context.jsonl"}) {
    const std::vector<double> got = losses(file);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 2e-4) << file;
    EXPECT_EQ(metric(file, "tokens"), metric("plain.jsonl", "tokens")) << file;
  }
}

TEST_F(LayoutProgram, ResumesAndGeneratesInAnotherLayout) {
  const Outcome uneven = sherd(with(train({"--ranks", "4"}), {"parallel.tensor=4"}));
  EXPECT_NE(uneven.code, 0);
  EXPECT_THAT(uneven.err, HasSubstr("4 tensor ranks cannot share 2 heads"));
  const Outcome saved = sherd(with(train({"--ranks", "4"}), {"parallel.tensor=2", "parallel.context=2"}));
  ASSERT_EQ(saved.code, 0) << saved.err;
  const Outcome resumed =
      sherd(with(train({"--ranks", "2", "--resume"}), {"parallel.tensor=2", "training.steps=8"}));
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.err,
              HasSubstr("4 ranks (tensor 2 x context 2 x data 1) wrote it, and it goes on with 2 "
                        "(tensor 2 x context 1 x data 1)"));
  const std::vector<std::string> generate{"generate", "--checkpoint", (folder_ / "run").string(),
                                          "--prompt", "The 3",        "--temperature",
                                          "0",        "--max-tokens", "12"};
  const Outcome alone = sherd(generate), shared = sherd(with(generate, {"parallel.tensor=2"}));
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(shared.code, 0) << shared.err;
  EXPECT_EQ(shared.out, alone.out);
  const Outcome refused = sherd(with(generate, {"parallel.context=2"}));
  EXPECT_THAT(refused.err, HasSubstr("parallel.context is 2: every rank has whole texts"));
  EXPECT_THAT(sherd(with(generate, {"model.num_layers=3"})).err,
              HasSubstr("--set takes keys of the section parallel here"));
}

TEST_F(LayoutProgram, TrainsInStages) {
  const auto run = [&](std::vector<std::string> arguments, std::vector<std::string> keys,
                       const std::string& file) {
    for (const char* key : {"train_micro_batch_size_per_gpu=1", "bf16.enabled=false", "model.dropout=0.1",
                            "model.tie_embeddings=false"})
      keys.emplace_back(key);
    arguments.insert(arguments.end(), {"--metrics", metrics(file)});
    const Outcome outcome = sherd(with(train(arguments), keys));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome;
  };
  run({"--ranks", "1"}, {"training.save_dir="}, "alone.jsonl");
  const Outcome stages = run(
      {"--ranks", "3"}, {"parallel.pipeline=3", "training.steps=4", "training.eval_interval=2"}, "a.jsonl");
  EXPECT_THAT(stages.err, HasSubstr("over local(3), tensor 1 x context 1 x data 1 x pipeline 3, "));
  EXPECT_THAT(stages.out, HasSubstr("point to point"));
  // Where the middle stage read no batch, the loaders have come as far: the samples that follow are the same.
  run({"--ranks", "4", "--resume"}, {"pipeline.stages=2", "pipeline.partition=uniform"}, "b.jsonl");
  std::vector<std::string> got = metric("a.jsonl", "loss");
  for (const std::string& loss : metric("b.jsonl", "loss")) got.push_back(loss);
  EXPECT_EQ(got, metric("alone.jsonl", "loss")) << "to the bit, on any number of stages and data ranks";
  EXPECT_EQ(metric("b.jsonl", "val_loss").back(), metric("alone.jsonl", "val_loss").back());

  const std::vector<std::string> generate{"generate", "--checkpoint", (folder_ / "run").string(),
                                          "--prompt", "The 3",        "--temperature",
                                          "0",        "--max-tokens", "12"};
  const Outcome alone = sherd(generate), shared = sherd(with(generate, {"parallel.pipeline=2"}));
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(shared.code, 0) << shared.err;
  EXPECT_EQ(shared.out, alone.out);
  EXPECT_THAT(sherd(with(train({"--ranks", "5"}), {"parallel.pipeline=5"})).err,
              HasSubstr("parallel.pipeline is 5: 5 runs of parts, and the model has 4 parts"));
  EXPECT_THAT(sherd(with(train({"--ranks", "2"}), {"parallel.pipeline=2", "parallel.virtual_stages=2",
                                                   "train_micro_batch_size_per_gpu=4"}))
                  .err,
              HasSubstr("set gradient_accumulation_steps to 2 or a multiple, or take schedule 1f1b"));
}

TEST_F(LayoutProgram, IsEstimatedAndAdvised) {
  const std::vector<std::string> frugal{"train_micro_batch_size_per_gpu=1",
                                        "zero_optimization.offload_optimizer.device=cpu",
                                        "zero_optimization.offload_param.device=cpu",
                                        "zero_optimization.reduce_bucket_size=500000",
                                        "zero_optimization.stage3_prefetch_bucket_size=0",
                                        "zero_optimization.stage3_max_reuse_distance=0",
                                        "training.recompute=full",
                                        "activation_checkpointing.cpu_checkpointing=true"};
  const auto peak = [&](const std::vector<std::string>& more) {
    const Outcome told =
        sherd(with(with({"estimate", "--config", config(), "--gpus", "2", "--json"}, frugal), more));
    EXPECT_EQ(told.code, 0) << told.err;
    EXPECT_THAT(told.out, HasSubstr(more.empty() ? "\"data\": 2" : "\"tensor\": 2"));
    const auto device = told.out.find("\"device\": {"), at = told.out.find("\"peak\"", device);
    return std::stoull(told.out.substr(told.out.find("\"total\": ", at) + 9));
  };
  const auto whole = peak({}), shared = peak({"parallel.tensor=2"});
  ASSERT_LT(shared, whole);
  const Outcome tight = sherd(with(with({"estimate", "--config", config(), "--gpus", "2"}, frugal),
                                   {cat("device.device_memory_limit=", (whole + shared) / 2)}));
  EXPECT_EQ(tight.code, 3) << tight.out << tight.err;
  EXPECT_THAT(tight.out, HasSubstr("Cheapest change that fits: --set parallel.tensor=2\n"));
  EXPECT_THAT(tight.out, HasSubstr("layers are cut over more ranks"));
  EXPECT_THAT(sherd(with({"estimate", "--config", config(), "--gpus", "4"}, {"parallel.tensor=2"})).out,
              HasSubstr("4 ranks on 1 machine, tensor 2 x context 1 x data 2, micro-batches of 2"));
  EXPECT_THAT(sherd(with({"estimate", "--config", config(), "--gpus", "4"}, {"parallel.tensor=3"})).err,
              HasSubstr("parallel.tensor 3 does not divide the 4 ranks; sizes that do: 1, 2, 4"));
}

TEST_F(LayoutProgram, TellsOfAllSizesThatDoNotFitAtOnceInTheKeysThatWereGiven) {
  const std::vector<std::string> keys{"tensor_parallel.autotp_size=5", "pipeline.stages=2",
                                      "parallel.virtual_stages=3"};
  const std::vector<std::string> told{
      "the configuration has 6 problems:",
      "tensor_parallel.autotp_size 5 does not divide the 2 ranks of a pipeline stage; sizes that do: 1, 2",
      "5 tensor ranks cannot share 2 heads with 2 key-value heads evenly: tensor_parallel.autotp_size may be "
      "1, 2",
      "a feed-forward width of 128 cannot be cut over 5 tensor ranks: make model.ffn_hidden_size a multiple "
      "of "
      "5",
      "sequences of 16 tokens cannot be cut over 5 tensor and 1 context rank: make model.seq_length a "
      "multiple "
      "of 5",
      "ids cannot be cut over 5 tensor ranks: make model.pad_vocab_to_multiple_of a multiple of 5",
      "pipeline.stages is 2, with 3 virtual stages each: 6 runs of parts, and the model has 4 parts; take "
      "pipeline.stages x parallel.virtual_stages of at most 4"};
  for (const auto& command : {train({"--ranks", "4"}), {"estimate", "--config", config(), "--ranks", "4"}}) {
    const Outcome refused = sherd(with(command, keys));
    EXPECT_EQ(refused.code, 2);
    for (const std::string& problem : told) EXPECT_THAT(refused.err, HasSubstr(problem));
    EXPECT_THAT(refused.err, Not(HasSubstr("parallel.tensor")));
  }
  const Outcome ulysses =
      sherd(with({"estimate", "--config", config(), "--ranks", "2"}, {"sequence_parallel_size=4"}));
  EXPECT_THAT(ulysses.err, HasSubstr("sequence_parallel_size 4 does not divide the 2 ranks"));
  EXPECT_THAT(ulysses.err, HasSubstr("or a sequence_parallel_size that divides them"));
}

}  // namespace
}  // namespace sherd::cli
