// training.keep_best and training.patience.
#include <set>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

/// With a rate of 0 every evaluation finds the same loss: the first one is the best.
class EarlyStop : public Train {
 protected:
  std::vector<std::string> still(const std::vector<std::string>& keys) const {
    std::vector<std::string> out = train({"--ranks", "2", "--metrics", (folder_ / "m.jsonl").string()});
    for (const std::string& key :
         {std::string("optimizer.params.lr=0"), std::string("training.eval_interval=1")})
      out.insert(out.end(), {"--set", key});
    for (const std::string& key : keys) out.insert(out.end(), {"--set", key});
    return out;
  }
  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder_ / "run")) out.insert(entry.path().filename());
    return out;
  }
};

TEST_F(EarlyStop, PatienceEndsARunAndOneThatGoesOnCountsOn) {
  const std::string why =
      "stopped after step 4: 3 evaluations without a lower validation loss "
      "(training.patience); the lowest, ";
  Outcome run = sherd(still({"training.patience=3", "training.steps=100"}));
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr(why));
  EXPECT_THAT(run.err, HasSubstr(", was after step 1"));
  EXPECT_EQ(metric("m.jsonl", "step").size(), 4u);
  EXPECT_EQ(names(), (std::set<std::string>{"global_step4", "latest", "steps.jsonl"}));
  auto again = still({"training.patience=3", "training.steps=100"});
  again.push_back("--resume");
  run = sherd(again);
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("nothing is left to do: training.patience is used up; raise it to go on"));

  fs::remove_all(folder_ / "run");
  run = sherd(still({"training.patience=3", "training.steps=2"}));
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(count(run.err, "patience"), 0u) << run.err;
  run = sherd(again);
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr(why));
}

TEST_F(EarlyStop, TheBestCheckpointStaysAndHasAName) {
  for (const char* async : {"true", "false"}) {
    fs::remove_all(folder_ / "run");
    const Outcome run = sherd(still({"training.keep_best=true", "training.keep_last=1",
                                     "training.save_interval=2", cat("training.save_async=", async)}));
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(names(),
              (std::set<std::string>{"best", "global_step1", "global_step6", "latest", "steps.jsonl"}));
    EXPECT_EQ(read_text(folder_ / "run/best"), "global_step1\n");
    EXPECT_THAT(run.err, HasSubstr(cat("the best checkpoint is ", (folder_ / "run/global_step1").string(),
                                       ", with validation loss ")));
    const std::string manifest = read_text(folder_ / "run/global_step1/manifest.json");
    EXPECT_THAT(manifest, HasSubstr(cat("\"val_loss\": \"", metric("m.jsonl", "val_loss")[0])));
  }
  for (const std::vector<std::string>& named :
       {std::vector<std::string>{(folder_ / "run").string(), "--tag", "best"},
        std::vector<std::string>{(folder_ / "run/best").string()}}) {
    std::vector<std::string> generate{"generate", "--prompt", "The", "--max-tokens", "3", "--checkpoint"};
    generate.insert(generate.end(), named.begin(), named.end());
    const Outcome text = sherd(generate);
    EXPECT_EQ(text.code, 0) << text.err;
  }
  auto again = still({"training.keep_best=true", "training.keep_last=1"});
  again.insert(again.end(), {"--resume", "--tag", "best"});
  const Outcome run = sherd(again);
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("at step 1"));
}

TEST_F(EarlyStop, WithoutValidationDataBothAreRefused) {
  for (const auto& [key, name] : {std::pair("training.patience=1", "training.patience"),
                                  std::pair("training.keep_best=true", "training.keep_best")}) {
    const Outcome run = sherd(still({key, "data.split=[1.0,0.0]"}));
    EXPECT_EQ(run.code, 2);
    EXPECT_THAT(run.err,
                HasSubstr(cat(name, " goes by the validation loss, and there are no validation data")));
  }
  const Outcome run = sherd(train({"--set", "training.patience=1"}));
  EXPECT_EQ(run.code, 2);
  EXPECT_THAT(run.err, HasSubstr("training: patience goes by the validation loss: set eval_interval"));
}

}  // namespace
}  // namespace sherd::cli
