#include <gmock/gmock.h>

#include <sstream>

#include "config/support.h"
#include "config/trainer_reference.h"

namespace sherd::config {
namespace {

/// `{…}` of several texts as one object.
std::string merged(const std::vector<std::string>& objects) {
  std::string out;
  for (const std::string& object : objects) {
    const std::string inside = object.substr(1, object.rfind('}') - 1);
    if (inside.find_first_not_of(" \n") != std::string::npos) out += (out.empty() ? "" : ", ") + inside;
  }
  return "{" + out + "}";
}

std::string model(int hidden) {
  return cat(R"({"model": {"seq_length": 8, "num_layers": 1, "num_heads": 1, "hidden_size": )", hidden, "}}");
}

std::string with_training(const std::string& file, const std::string& training) {
  return merged({file, model(16), "{\"training\": " + training + "}"});
}

Config parse_with_training(const std::string& file, const std::string& training) {
  return parse_text(with_training(file, training));
}

TEST(Trainer, FillsAutoAsTransformersDoes) {
  for (const trainer_reference::Case& one : trainer_reference::cases) {
    const std::string text =
        merged({one.file, model(one.hidden_size), cat("{\"training\": ", one.training, "}")});
    SCOPED_TRACE(text);
    std::istringstream contradictions(one.contradictions);
    if (*one.contradictions != '\0') {
      const std::string message = error_of(text);
      std::string key, argument;
      std::size_t count = 0;
      while (contradictions >> key >> argument) {
        ++count;
        if (argument.starts_with("fp16|") || argument.starts_with("bf16|")) argument = "precision";
        if (argument == "adam_beta1+adam_beta2") argument = "adam_beta2";
        EXPECT_THAT(message, ::testing::HasSubstr(cat(key, ": ")));
        EXPECT_THAT(message,
                    ::testing::ContainsRegex(cat(key, ": .* contradicts training.", argument, ", ")));
      }
      EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), count == 1 ? 0 : count) << message;
      continue;
    }
    Config ours, theirs;
    ASSERT_NO_THROW(ours = parse_text(text));
    ASSERT_NO_THROW(theirs = parse_text(merged({one.filled, model(one.hidden_size)})));
    ours.batch = resolve_batch(ours, 1), theirs.batch = resolve_batch(theirs, 1);
    theirs.training = ours.training;
    EXPECT_TRUE(ours == theirs) << dump(ours) << dump(theirs);
    EXPECT_TRUE(parse_text(dump(ours)) == ours);
  }
}

TEST(Trainer, MakesOptimizerAndScheduleWhereTheFileHasNone) {
  const Config plain = parse_with_training(R"({"train_batch_size": 8})", R"({"steps": 10})");
  EXPECT_FALSE(plain.optimizer.given);
  EXPECT_EQ(plain.optimizer.lr, 1e-3) << "nothing here is the Trainer's";
  EXPECT_TRUE(std::holds_alternative<std::monostate>(plain.scheduler));

  const Config made = parse_with_training(
      "{}", R"({"steps": 10, "learning_rate": 3e-4, "warmup_ratio": 0.25, "adam_beta2": 0.95})");
  EXPECT_EQ(made.optimizer.type, OptimizerType::adamw);
  EXPECT_EQ(made.optimizer.lr, 3e-4);
  EXPECT_EQ(made.optimizer.betas()->beta1, 0.9);
  EXPECT_EQ(made.optimizer.betas()->beta2, 0.95);
  EXPECT_EQ(made.batch.micro_batch_size, 8);
  const auto& schedule = std::get<TrainerSchedule>(made.scheduler);
  EXPECT_TRUE((schedule == TrainerSchedule{RateShape::linear, 10, 3}));

  // "auto" alone speaks of the Trainer, whose defaults then hold.
  const Config left = parse_with_training(R"({"train_batch_size": "auto"})", R"({"steps": 10})");
  EXPECT_EQ(left.optimizer.lr, 5e-5);
  EXPECT_EQ(left.batch.micro_batch_size, 8);
  EXPECT_TRUE((std::get<TrainerSchedule>(left.scheduler) == TrainerSchedule{RateShape::linear, 10, 0}));

  const auto of = [](const char* shape) {
    return parse_with_training(
               "{}", cat(R"({"steps": 10, "warmup_steps": 2, "lr_scheduler_type": ")", shape, "\"}"))
        .scheduler;
  };
  EXPECT_TRUE(std::holds_alternative<std::monostate>(of("constant")));
  EXPECT_TRUE((std::get<TrainerSchedule>(of("cosine")) == TrainerSchedule{RateShape::cosine, 10, 2}));
  EXPECT_TRUE((std::get<TrainerSchedule>(of("constant_with_warmup")) ==
               TrainerSchedule{RateShape::constant_with_warmup, 0, 2}));

  // Schedules of the file's own optimizer are the Trainer's, too.
  const Config mixed = parse_with_training(
      R"({"optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}}})", R"({"steps": 5})");
  EXPECT_EQ(mixed.optimizer.type, OptimizerType::sgd);
  EXPECT_EQ(mixed.optimizer.lr, 5e-5);
  EXPECT_TRUE(std::holds_alternative<TrainerSchedule>(mixed.scheduler));
  EXPECT_TRUE(has_note(parse_with_training(R"({"train_batch_size": "auto"})", "{}"),
                       "scheduler: not given; Trainer's needs training.steps"));
}

/// A section that says nothing of rates and rules leaves them alone.
TEST(Trainer, ArgumentsOfTheBatchMakeNoSchedule) {
  const Config config = parse_with_training(
      R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})",
      R"({"steps": 10, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "precision": "bf16"})");
  EXPECT_TRUE(std::holds_alternative<std::monostate>(config.scheduler));
  EXPECT_EQ(config.optimizer.lr, 0.01);
  EXPECT_EQ(config.batch.gradient_accumulation_steps, 2);
  EXPECT_EQ(config.gradient_clipping, 0.5);
}

TEST(Trainer, QuotesChangeNothing) {
  const Config config = parse_text(merged(
      {R"({"zero_optimization": {"stage": "3", "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
          "optimizer": {"type": "AdamW", "params": {"lr": "1e-3", "betas": ["0.9", 0.95], "eps": "auto"}},
          "gradient_clipping": "1.0", "bf16": {"enabled": "true"}, "train_micro_batch_size_per_gpu": "2"})",
       R"({"model": {"seq_length": 8, "num_layers": 1, "num_heads": 1, "hidden_size": "32"}})",
       R"({"training": {"steps": "6", "learning_rate": 1e-3, "adam_beta2": 0.95, "max_grad_norm": 1.0,
           "precision": "bf16", "micro_batch_size": 2}})"}));
  EXPECT_TRUE((std::get<TrainerSchedule>(config.scheduler) == TrainerSchedule{RateShape::linear, 6, 0}));
  EXPECT_EQ(config.zero.reduce_bucket_size, 32 * 32);
  EXPECT_EQ(config.zero.prefetch_bucket_size, 921);
  EXPECT_EQ(config.optimizer.lr, 1e-3);
}

TEST(Trainer, ASchedulerWithoutTypeIsAnError) {
  EXPECT_THAT(error_of(with_training(R"({"scheduler": {"params": {"warmup_num_steps": 5}}})",
                                     R"({"steps": 10, "learning_rate": 1e-3})")),
              ::testing::HasSubstr("scheduler: needs a \"type\""));
}

TEST(Trainer, ArgumentsReachSectionsThatDoNotSay) {
  const Config config =
      parse_with_training(R"({"optimizer": {"type": "AdamW", "params": {}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}, "fp16": {"loss_scale": 8}})",
                          R"({"learning_rate": 2e-4, "weight_decay": 0.1, "precision": "fp16",
      "warmup_steps": 9, "max_grad_norm": 0.25, "micro_batch_size": 3, "gradient_accumulation_steps": 2})");
  EXPECT_EQ(config.optimizer.lr, 2e-4);
  EXPECT_EQ(config.optimizer.weight_decay, 0.1);
  EXPECT_EQ(std::get<Warmup>(config.scheduler).warmup_max_lr, 2e-4);
  EXPECT_EQ(std::get<Warmup>(config.scheduler).warmup_num_steps, 9);
  EXPECT_EQ(config.precision.compute, DType::f16);
  EXPECT_EQ(config.gradient_clipping, 0.25);
  EXPECT_EQ(config.batch.micro_batch_size, 3);
  EXPECT_EQ(config.batch.gradient_accumulation_steps, 2);
  EXPECT_EQ(parse_with_training(R"({"bfloat16": {"enabled": "auto"}})", R"({"precision": "bf16"})")
                .precision.compute,
            DType::bf16);
  EXPECT_EQ(parse_with_training("{}", R"({"precision": "bf16"})").precision.compute, DType::bf16);
}

TEST(Trainer, ABatchOfAllRanksDecidesWhatNoArgumentSays) {
  const auto batch = [](const std::string& file, const std::string& training, int ranks) {
    return resolve_batch(parse_with_training(file, training), ranks);
  };
  const std::string open =
      R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"})";
  EXPECT_TRUE((batch(open, "{}", 4) == Batch{64, 16, 1}));
  EXPECT_TRUE((batch(open, R"({"per_device_train_batch_size": 2})", 4) == Batch{64, 2, 8}));
  EXPECT_TRUE((batch(open, R"({"gradient_accumulation_steps": 4})", 4) == Batch{64, 4, 4}));
  EXPECT_TRUE((batch(R"({"train_batch_size": "auto", "gradient_accumulation_steps": 3})", "{}", 2) ==
               Batch{48, 8, 3}));
  try {
    batch(R"({"train_batch_size": 10})", R"({"per_device_train_batch_size": 3})", 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("train_micro_batch_size_per_gpu 3"));
  }
}

TEST(Trainer, ErrorsNameBothKeysAndWhere) {
  EXPECT_EQ(error_of("{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.001}},\n"
                     " \"training\": {\"learning_rate\": 5e-05}}"),
            "run.json:1: optimizer.params.lr: 0.001 contradicts training.learning_rate, 5e-05 (run.json:2): "
            "they say the same, so keep one of them, or give \"auto\" here");
  EXPECT_EQ(error_of(R"({"training": {"learning_rate": "fast", "precision": "bf17"}})"),
            "the configuration has 2 problems:\n"
            "run.json:1: training.learning_rate: must be a number >= 0, not \"fast\"\n"
            "run.json:1: training.precision: \"bf17\" is none of fp32, fp16, bf16; did you mean \"bf16\"?");
  const std::string decay =
      R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})";
  EXPECT_EQ(error_of(decay),
            "run.json:1: scheduler.params.total_num_steps: \"auto\" is training.steps, which is not given; "
            "give it, or a number here");
  EXPECT_EQ(error_of(R"({"training": {"warmup_ratio": 0.1}})"),
            "run.json:1: training.warmup_ratio: 0.1 is a share of training.steps, which is not given; give "
            "it, or a number of steps as training.warmup_steps");
  EXPECT_EQ(error_of(R"({"training": {"micro_batch_size": 2, "per_device_train_batch_size": 2}})"),
            "run.json:1: training.per_device_train_batch_size: means the same as \"micro_batch_size\", which "
            "is given too; remove one of the two");
  EXPECT_THAT(error_of(R"({"training": {"save_steps": 5}})"),
              ::testing::HasSubstr("did you mean \"training.save_interval\"?"));
}

TEST(Trainer, OverridesGoBeforeArgumentsInFiles) {
  const std::string file = with_training(R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})",
                                         R"({"learning_rate": 1e-4, "micro_batch_size": 8})");
  const Config config =
      parse_text(file, "run.json", {"optimizer.params.lr=0.5", "train_micro_batch_size_per_gpu=2"});
  EXPECT_EQ(config.optimizer.lr, 0.5);
  EXPECT_EQ(config.batch.micro_batch_size, 2);
  EXPECT_TRUE(has_note(config, "training.learning_rate: no effect: --set optimizer.params.lr"));
  EXPECT_EQ(parse_text(file, "run.json", {"training.learning_rate=0.25"}).optimizer.lr, 0.25);
}

TEST(Trainer, SaysWhatHasNoEffect) {
  const Config config =
      parse_with_training(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0,
      "cycle_max_lr": 1}}})",
                          R"({"lr_scheduler_type": "cosine", "warmup_steps": 3})");
  EXPECT_TRUE(has_note(config, "training.lr_scheduler_type: no effect: the file has a section scheduler"));
  EXPECT_TRUE(has_note(config, "training.warmup_steps: no effect: the file's scheduler does not warm up"));
  EXPECT_TRUE(has_note(parse_with_training("{}", R"({"lr_scheduler_type": "constant", "warmup_steps": 3})"),
                       "training.warmup_steps: no effect: training.lr_scheduler_type is \"constant\""));
}

}  // namespace
}  // namespace sherd::config
