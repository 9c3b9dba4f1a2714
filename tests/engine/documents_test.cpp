// Several sources of masked documents that are kept apart, over every layout: the same losses and weights as
// on one rank, from data whose micro-batches have different numbers of targets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/random.h"
#include "data/dataset_builder.h"
#include "data/dataset_info.h"
#include "engine/initialize.h"
#include "engine/setup/process_grid.h"
#include "engine/token_data.h"
#include "engine/trainer.h"
#include "engine/update/step_update.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;

class DocumentTraining : public ::testing::Test {
 protected:
  DocumentTraining() {
    write("a", 7, 3);
    write("b", 11, 5);
  }

  /// Documents of up to `longest` tokens, of which every `nth` is a target.
  void write(const std::string& name, std::int32_t longest, std::uint64_t nth) const {
    const std::string prefix = (folder_ / name).string();
    data::DatasetBuilder builder(prefix, 29);
    for (std::uint64_t d = 0; d < 200; ++d) {
      std::vector<std::int32_t> tokens(2 + philox({nth, 1}, d)[0] % static_cast<std::uint32_t>(longest - 1));
      std::vector<std::uint8_t> learned(tokens.size());
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<std::int32_t>(philox({nth, d + 2}, i)[0] % 29);
        learned[i] = (d + i) % nth == 0;
      }
      builder.add(tokens, true, learned);
    }
    const data::DatasetInfo info{
        "byte", 29, 0, "uint16", builder.counts().tokens, 200, 200, 0, 0, builder.counts().masked, ""};
    builder.finish([&] { data::write_dataset_info(prefix, info); });
  }

  config::Config config(int stage, int micro, int accumulation, const std::string& more,
                        const std::string& data = R"(, "packing": "documents")",
                        const std::string& type = "gpt2") const {
    return config::parse_text(cat(R"({"model": {"type": ")", type,
                                  R"(", "hidden_size": 16, "num_layers": 4, "num_heads": 2, "seq_length": 12,
        "vocab_size": 29, "dropout": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.5}}, "gradient_clipping": 1,
        "train_micro_batch_size_per_gpu": )",
                                  micro, R"(, "gradient_accumulation_steps": )", accumulation,
                                  R"(, "zero_optimization": {"stage": )", stage,
                                  R"(}, "data": {"split": [0.9, 0.1], "sources": [{"path": ")",
                                  (folder_ / "a").string(), R"(", "weight": 2}, {"path": ")",
                                  (folder_ / "b").string(), R"(", "weight": 1}])", data, "}", more, "}"));
  }

  static std::vector<double> train(int ranks, const config::Config& config) {
    std::vector<double> out;
    const auto data = engine::open_token_data(config);
    launch_ranks(ranks, [&](DistributedPtr dist) {
      const auto groups = make_groups(dist, config);
      Engine engine(dist,
                    std::make_shared<models::Gpt>(models::gpt_config(config, 29), layout_of(*groups, config)),
                    config, nullptr, nullptr, groups);
      const auto loader = data->training_loader(engine.loader_rank(), engine.device());
      const auto validation = data->validation_loader(engine.loader_rank(), 8, engine.device());
      for (int step = 0; step < 4; ++step) {
        const auto& report = engine.train_batch([&] { return loader->next(); });
        if (dist->rank() == 0) out.insert(out.end(), {report.loss, report.grad_norm});
      }
      const double loss = engine.eval_batches([&] { return validation->next(); },
                                              8 / engine.data_ranks().size() / config.batch.micro_batch_size);
      if (dist->rank() == 0) out.push_back(loss);
    });
    return out;
  }

  TempFolder folder_;
};

TEST_F(DocumentTraining, IsThatOfOneRankInEveryLayout) {
  for (const std::string type : {"gpt2", "llama"}) {
    const auto with = [&](int stage, int micro, int accumulation, const std::string& more) {
      return config(stage, micro, accumulation, more, R"(, "packing": "documents")", type);
    };
    const std::vector<double> expected = train(1, with(0, 8, 1, ""));
    EXPECT_NE(expected[6], expected[0]);
    const auto expect = [&](const char* what, int ranks, const config::Config& setting) {
      SCOPED_TRACE(cat(type, ", ", what));
      const std::vector<double> got = train(ranks, setting);
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_NEAR(got[i], expected[i], 2e-5 * (1 + std::abs(expected[i])));
    };
    expect("accumulated", 1, with(1, 1, 8, ""));
    expect("two ranks, stage 3", 2, with(3, 2, 2, ""));
    expect("full recompute", 1, with(2, 2, 4, R"(, "training": {"recompute": "full"})"));
    expect("layered", 1, with(3, 2, 4, R"(, "parallel": {"schedule": "layered"})"));
    expect("tensor and sequence parallel", 2, with(0, 4, 2, R"(, "parallel": {"tensor": 2})"));
    expect("pipeline", 2, with(0, 2, 4, R"(, "parallel": {"pipeline": 2})"));
    expect("four stages", 4, with(0, 1, 8, R"(, "parallel": {"pipeline": 4, "schedule": "gpipe"})"));
    expect("optimizer on the host", 2,
           config::parse_text(config::dump(with(2, 2, 2, "")), "",
                              {"zero_optimization.offload_optimizer.device=cpu"}));
  }
}

/// An update that begins beside backward takes what micro-batches weigh with the loss.
TEST_F(DocumentTraining, EarlyUpdatesHaveTheBitsOfLateOnes) {
  const auto setting = [&](const char* device) {
    return config::parse_text(config::dump(config(2, 2, 2, "")), "",
                              {"bf16.enabled=true", "bf16.check_grad_overflow=false", "gradient_clipping=0",
                               cat("zero_optimization.offload_optimizer.device=", device)});
  };
  EXPECT_TRUE(engine::StepUpdate::may_begin_early(setting("cpu")));
  EXPECT_FALSE(engine::StepUpdate::may_begin_early(setting("none")));
  EXPECT_EQ(train(2, setting("cpu")), train(2, setting("none")));
}

/// Padding at the end of rows is not counted in token rates, in any run and by any rank.
TEST_F(DocumentTraining, RatesCountTokensAlone) {
  const auto lines_of = [&](int ranks, int pipeline, std::int64_t steps, bool resume) {
    const config::Config setting =
        config(0, 8 / ranks * pipeline, 1,
               cat(R"(, "parallel": {"pipeline": )", pipeline, R"(}, "training": {"steps": )", steps,
                   R"(, "save_dir": ")", (folder_ / cat("run", ranks)).string(), R"("})"));
    const auto data = engine::open_token_data(setting);
    std::vector<engine::StepMetrics> lines;
    launch_ranks(ranks, [&](DistributedPtr dist) {
      const auto groups = make_groups(dist, setting);
      Engine engine(
          dist, std::make_shared<models::Gpt>(models::gpt_config(setting, 29), layout_of(*groups, setting)),
          setting, nullptr, nullptr, groups);
      const auto loader = data->training_loader(engine.loader_rank(), engine.device());
      engine.set_training_data(*loader, data);
      TrainerOptions options;
      options.progress = false, options.resume = resume;
      options.mfu = [](double tokens_per_second) { return tokens_per_second; };
      options.after_step = [&](const engine::StepMetrics& line) {
        if (dist->rank() == 0) lines.push_back(line);
      };
      Trainer trainer(engine, *loader, options);
      trainer.run();
    });
    return lines;
  };
  std::vector<std::int64_t> tokens{0};
  const auto data = engine::open_token_data(config(0, 8, 1, ""));
  for (std::int64_t position = 0; position < 5 * 8; ++position) {
    data::SampleRow row;
    data->train->load(position, row);
    if (position % 8 == 0) tokens.push_back(tokens.back());
    tokens.back() += 12 - row.filling;
  }
  const auto expect = [&](const std::vector<engine::StepMetrics>& lines, std::size_t first) {
    ASSERT_FALSE(lines.empty());
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const engine::StepMetrics& line = lines[i];
      EXPECT_EQ(line.tokens, tokens[first + i]);
      EXPECT_DOUBLE_EQ(line.tokens_per_s * line.step_ms / 1e3,
                       static_cast<double>(tokens[first + i] - tokens[first + i - 1]));
      EXPECT_EQ(line.mfu, line.tokens_per_s);
    }
  };
  EXPECT_LT(tokens.back(), 5 * 8 * 12);
  expect(lines_of(1, 1, 3, false), 1);
  expect(lines_of(1, 1, 5, true), 4);
  expect(lines_of(2, 1, 5, false), 1);
  expect(lines_of(4, 2, 5, false), 1);
}

/// As DeepSpeed scales by the configured number of micro-batches, wherever the caller puts the boundary.
TEST_F(DocumentTraining, AStepThatEndsEarlyKeepsItsDivisor) {
  const auto norm = [&](int accumulation) {
    const config::Config setting = config(0, 1, accumulation, "");
    const auto data = engine::open_token_data(setting);
    double out = 0;
    launch_ranks(1, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(setting, 29)), setting);
      const auto loader = data->training_loader(engine.loader_rank(), engine.device());
      for (int i = 0; i < 2; ++i) {
        engine.set_gradient_accumulation_boundary(i == 1);
        engine.backward(engine.forward(loader->next()));
        engine.step();
      }
      out = *engine.get_global_grad_norm();
    });
    return out;
  };
  EXPECT_NEAR(norm(8), norm(2) / 4, 1e-6 * norm(2));
}

/// As of published models whose tokenizer got tokens for which the embedding has no rows: data without them
/// are fine, and what uses one is refused at the start.
TEST_F(DocumentTraining, ATokenizerMayHaveMoreIdsThanTheModel) {
  const auto open = [&](int vocabulary) {
    config::Config of = config(0, 1, 1, "");
    of.model->vocab_size = vocabulary;
    return engine::open_token_data(of);
  };
  for (const char* name : {"a", "b"}) {
    data::DatasetInfo info = *data::read_dataset_info((folder_ / name).string());
    info.vocab_size = 40;
    data::write_dataset_info((folder_ / name).string(), info);
  }
  data::SampleRow row;
  const auto plenty = open(29);
  EXPECT_EQ(plenty->vocab_size, 29);
  for (std::int64_t i = 0; i < 50; ++i) plenty->train->load(i, row);
  expect_error(ErrorKind::data, "beyond the vocabulary of 12", [&] { open(12); });  // before anything begins
}

TEST_F(DocumentTraining, MeansOfMeansAreAnotherLoss) {
  const std::string means = R"(, "training": {"loss_average": "micro_batches"})";
  const double tokens = train(1, config(0, 1, 8, ""))[0], of_means = train(1, config(0, 1, 8, means))[0];
  EXPECT_GT(std::abs(tokens - of_means), 1e-3);
  EXPECT_NEAR(train(1, config(0, 8, 1, ""))[0], train(1, config(0, 8, 1, means))[0], 1e-6)
      << "one micro-batch has one mean";
}

TEST_F(DocumentTraining, ContextRanksAreRefused) {
  expect_error(ErrorKind::config,
               R"(data.packing: "documents" are kept apart on ranks that have whole sequences)",
               [&] { config(0, 1, 1, R"(, "parallel": {"context": 2})"); });
}

/// Labels of which none is a target, as of conversations that were cut before their answers.
tensor::Batch without_targets(tensor::Batch batch) {
  if (batch.empty()) return batch;  // of a stage that reads none
  tensor::Tensor& labels = batch.at("labels");
  std::fill_n(labels.data<std::int32_t>(), labels.numel(), data::no_label);
  *batch.at("target_tokens").data<std::int32_t>() = 0;
  return batch;
}

/// It changes nothing: what comes after it is as if it had not been there.
TEST_F(DocumentTraining, AStepWithoutTargetsIsSkipped) {
  const auto losses = [&](int ranks, const config::Config& setting, bool with_such_a_step) {
    std::vector<double> out;
    const auto data = engine::open_token_data(setting);
    launch_ranks(ranks, [&](DistributedPtr dist) {
      const auto groups = make_groups(dist, setting);
      Engine engine(
          dist, std::make_shared<models::Gpt>(models::gpt_config(setting, 29), layout_of(*groups, setting)),
          setting, nullptr, nullptr, groups);
      const auto loader = data->training_loader(engine.loader_rank(), engine.device()),
                 other = data->training_loader(engine.loader_rank(), engine.device());
      for (int step = 0; step < 4; ++step) {
        if (step == 1 && with_such_a_step) {
          const auto& skipped = engine.train_batch([&] { return without_targets(other->next()); });
          EXPECT_FALSE(skipped.applied);
          EXPECT_FALSE(skipped.has_targets);
          EXPECT_TRUE(std::isnan(skipped.loss));
          EXPECT_EQ(engine.skipped_steps(), 1);
        }
        const auto& report = engine.train_batch([&] { return loader->next(); });
        EXPECT_TRUE(report.applied && report.has_targets);
        if (dist->rank() == 0) out.insert(out.end(), {report.loss, report.grad_norm});
      }
    });
    return out;
  };
  const auto expect_the_same = [&](const char* what, int ranks, const config::Config& setting) {
    SCOPED_TRACE(what);
    const std::vector<double> expected = losses(ranks, setting, false);
    EXPECT_EQ(losses(ranks, setting, true), expected);
  };
  expect_the_same("accumulated", 1, config(1, 2, 2, ""));
  expect_the_same("stage 3 over two ranks", 2, config(3, 2, 2, ""));
  expect_the_same("pipeline", 2, config(0, 2, 4, R"(, "parallel": {"pipeline": 2})"));
  expect_the_same("layered", 1, config(3, 2, 4, R"(, "parallel": {"schedule": "layered"})"));
  expect_the_same(
      "an update that begins early", 2,
      config::parse_text(config::dump(config(2, 2, 2, "")), "",
                         {"bf16.enabled=true", "bf16.check_grad_overflow=false", "gradient_clipping=0",
                          "zero_optimization.offload_optimizer.device=cpu"}));
}

/// A run of nothing but skipped steps is none.
TEST_F(DocumentTraining, TooManySkippedStepsInARowEndTheRun) {
  const auto run = [&](const config::Config& setting, bool targets) {
    const auto data = engine::open_token_data(setting);
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(setting, 29)), setting);
      const auto loader = data->training_loader(engine.loader_rank(), engine.device());
      const auto step = [&](bool empty) {
        engine.train_batch([&] { return empty ? without_targets(loader->next()) : loader->next(); });
      };
      if (targets) step(false);
      for (int i = 0; i < 2; ++i) step(!targets);
      EXPECT_EQ(engine.skipped_steps(), targets ? 3 : 2);
      if (!targets) step(false), step(true), step(true);  // counted in a row
      step(!targets);
    });
  };
  const config::Config setting = config(2, 2, 1, R"(, "training": {"max_skipped_steps": 3})");
  expect_error(ErrorKind::data,
               "the last 3 steps changed nothing (training.max_skipped_steps): of step 6, none of its tokens",
               [&] { run(setting, false); });
  const config::Config scaled =
      config::parse_text(config::dump(setting), "",
                         {"fp16.enabled=true", "fp16.loss_scale=1e30", "training.max_skipped_steps=4"});
  expect_error(ErrorKind::numerics,
               "of step 4, gradients overflowed at the loss scale 1e+30; lower a fixed fp16.loss_scale",
               [&] { run(scaled, true); });
  const config::Config any = config::parse_text(config::dump(scaled), "", {"training.max_skipped_steps=0"});
  EXPECT_NO_THROW(run(any, true));
}

TEST_F(DocumentTraining, SourcesOfDifferentTokenizersAreRefused) {
  auto info = *data::read_dataset_info((folder_ / "b").string());
  info.vocab_size = 28;
  data::write_dataset_info((folder_ / "b").string(), info);
  expect_error(ErrorKind::config, "is tokens of another tokenizer (byte, 28 ids) than",
               [&] { engine::open_token_data(config(0, 1, 1, "")); });
}

TEST_F(DocumentTraining, SourcesOfDifferentTemplatesAreRefused) {
  for (const auto& [name, written] : {std::pair{"a", "plain"}, {"b", "chatml"}}) {
    auto info = *data::read_dataset_info((folder_ / name).string());
    info.chat_template = written;
    data::write_dataset_info((folder_ / name).string(), info);
  }
  expect_error(ErrorKind::config, "are written by chatml, others by plain",
               [&] { engine::open_token_data(config(0, 1, 1, "")); });
}

}  // namespace
}  // namespace sherd::test
