#include <filesystem>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

/// Rows of a CSV file, the one of names left out.
std::vector<std::string> rows(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t at = text.find('\n') + 1; at > 0 && at < text.size(); at = text.find('\n', at) + 1)
    out.push_back(text.substr(at, text.find('\r', at) - at));
  return out;
}

std::vector<std::string> steps_of(const std::string& csv) {
  std::vector<std::string> out;
  for (const std::string& row : rows(csv)) out.push_back(row.substr(0, row.find(',')));
  return out;
}

class TrainMonitors : public Train {
 protected:
  std::string csv(const std::string& name) const {
    return read_text(folder_ / "logs" / "a" / ("Train_Samples_" + name + ".csv"));
  }
  std::vector<std::string> run(std::vector<std::string> more) const {
    std::vector<std::string> all = {"train", "--config", config(), "--ranks", "2"};
    const std::string logs = (folder_ / "logs").string();
    for (const char* section : {"tensorboard", "csv_monitor"})
      for (const std::string& key :
           {std::string("enabled=true"), std::string("job_name=a"), "output_path=" + logs})
        all.insert(all.end(), {"--set", cat(section, ".", key)});
    all.insert(all.end(), {"--set", "training.eval_interval=3"});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

TEST_F(TrainMonitors, HoldEachStepOnceOverAResume) {
  ASSERT_EQ(sherd(run({"--set", "training.save_interval=2", "--steps", "5"})).code, 0);
  EXPECT_THAT(steps_of(csv("train_loss")), ::testing::ElementsAre("4", "8", "12", "16", "20"));
  const Outcome resumed = sherd(run({"--resume", "--tag", "global_step2", "--steps", "6"}));
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(steps_of(csv("train_loss")), ::testing::ElementsAre("4", "8", "12", "16", "20", "24"));
  EXPECT_THAT(steps_of(csv("eval_loss")), ::testing::ElementsAre("12", "24"));
  EXPECT_EQ(csv("lr"), "step,lr\r\n4,0.003\r\n8,0.003\r\n12,0.003\r\n16,0.003\r\n20,0.003\r\n24,0.003\r\n");
  std::size_t event_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "logs" / "a"))
    event_files += entry.path().filename().string().starts_with("events.out.tfevents.");
  EXPECT_EQ(event_files, 2u) << "one of each run, from rank 0 alone";
}

TEST_F(TrainMonitors, FollowTheRatesThatTransformersTrainerMakes) {
  write_text(folder_ / "auto.json", R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
      "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "fp16": {"enabled": "auto"}})");
  write_text(folder_ / "mine.json", cat(R"({"data": {"path": ")", prefix(), R"("},
      "model": {"seq_length": 16, "hidden_size": 32, "num_layers": 1, "num_heads": 2},
      "training": {"steps": 4, "learning_rate": 8e-3, "warmup_steps": 1, "micro_batch_size": 2}})"));
  std::vector<std::string> arguments = run({});
  arguments[2] = (folder_ / "auto.json").string();
  arguments.insert(arguments.begin() + 3, (folder_ / "mine.json").string());
  const Outcome got = sherd(arguments);
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, HasSubstr("scheduler: not given; \"linear\", as Trainer makes it"));
  ASSERT_EQ(rows(csv("lr")).size(), 4u);
  const double want[] = {0, 8e-3, 8e-3 * 2 / 3, 8e-3 / 3};
  for (std::size_t i = 0; i < 4; ++i) {
    const std::string row = rows(csv("lr"))[i];
    EXPECT_EQ(row.substr(0, row.find(',')), std::to_string(4 * (i + 1)));
    EXPECT_NEAR(std::stod(row.substr(row.find(',') + 1)), want[i], 1e-15);
  }
}

}  // namespace
}  // namespace sherd::cli
