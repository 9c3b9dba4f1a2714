// --quiet and --json, of every command that has them.
#include <nlohmann/json.hpp>

#include "cli/shell/declared.h"
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using nlohmann::json;
using ::testing::IsEmpty;
using ::testing::Not;

class Results : public Train {
 protected:
  std::string path(const char* name) const { return (folder_ / name).string(); }
  /// The object that a command prints with --json --quiet; beside it there are warnings alone.
  json of(std::vector<std::string> arguments, int code = 0) {
    arguments.insert(arguments.end(), {"--json", "--quiet"});
    const Outcome outcome = sherd(arguments);
    EXPECT_EQ(outcome.code, code) << arguments[0] << ": " << outcome.err;
    if (code == 0) {
      EXPECT_EQ(count(outcome.err, "\n"), count(outcome.err, "warning: ")) << outcome.err;
    }
    const json out = json::parse(outcome.out, nullptr, false);
    EXPECT_TRUE(out.is_object()) << arguments[0] << ": " << outcome.out;
    return out;
  }
};

TEST_F(Results, AreOneJsonObject) {
  const json prepared = of({"prepare", "--input", path("text.txt"), "--output", path("again")});
  EXPECT_EQ(prepared["documents"], 400);
  EXPECT_EQ(prepared["vocab_size"], 257);
  EXPECT_GT(prepared["tokens"], prepared["text_bytes"].get<int>());

  const json trained = of(train({"--trace", path("trace.json")}));
  EXPECT_EQ(trained["step"], 6);
  EXPECT_GT(trained["loss"], 1.0);
  EXPECT_GT(trained["val_loss"], 1.0);
  EXPECT_GT(trained["tokens_per_s"], 0.0);
  EXPECT_GT(trained["peak_bytes"]["device"], 0);

  const json inspected = of({"checkpoint", "inspect", path("run"), "--parameters"});
  EXPECT_EQ(inspected["step"], 6);
  EXPECT_EQ(inspected["tensors"], inspected["parameters"].size());
  const json whole = of({"checkpoint", "verify", path("run")});
  EXPECT_EQ(whole["whole"], true);
  EXPECT_EQ(whole["checkpoint"], inspected["checkpoint"]);
  const json converted = of({"checkpoint", "convert", path("run"), "--output", path("two"), "--ranks", "2"});
  EXPECT_EQ(of({"checkpoint", "inspect", converted["checkpoint"]})["ranks"], 2);

  const json verified = of({"verify", path("run")});
  EXPECT_EQ(verified["agreement"], "equal");
  EXPECT_EQ(verified["intervals"].size(), 1u);
  EXPECT_EQ(verified["intervals"][0]["compared_steps"], 6);

  const json exported = of({"export", path("run"), "--output", path("hf")});
  EXPECT_EQ(exported["folder"], path("hf"));
  const json imported = of({"import", path("hf"), "--output", path("imported")});
  EXPECT_EQ(imported["checkpoint"], path("imported/imported"));
  EXPECT_EQ(imported["model"], "gpt2");

  write_text(folder_ / "t.jsonl", R"({"context": "The 1", "choices": [" shards", " jars"], "answer": 0}
)");
  EXPECT_EQ(of({"evaluate", "--checkpoint", path("run"), "--tasks", path("t.jsonl")}).size(), 1u);
  const json generated =
      of({"generate", "--checkpoint", path("run"), "--prompt", "The", "--max-tokens", "4"});
  EXPECT_EQ(generated["prompt"], "The");
  EXPECT_EQ(generated["tokens"], 4);
  EXPECT_TRUE(of({"info"}).contains("bf16_products"));
  EXPECT_TRUE(of({"estimate", "--config", config()}).is_object());
  EXPECT_TRUE(of({"bench", "adam", "--parameters", "64k", "--rounds", "1", "--threads", "1"}).is_object());
}

TEST_F(Results, DamageIsToldInJsonToo) {
  ASSERT_EQ(sherd(train({"--set", "training.save_interval=3"})).code, 0);
  for (const auto& file : std::filesystem::directory_iterator(folder_ / "run" / "global_step3"))
    if (file.path().extension() == ".safetensors") std::filesystem::resize_file(file.path(), 10);
  const json all = of({"checkpoint", "verify", "--all", path("run")}, 1)["checkpoints"];
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0]["whole"], false);
  EXPECT_THAT(all[0]["error"].get<std::string>(), Not(IsEmpty()));
  EXPECT_EQ(all[1]["whole"], true);
}

TEST_F(Results, QuietLeavesResultsAndWarnings) {
  const Outcome outcome =
      sherd(train({"--quiet", "--set", "training.eval_steps=3", "--set", "data.split=[0.9999,0.0001]"}));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.err, HasSubstr("warning: no validation"));
  EXPECT_EQ(count(outcome.err, "\n"), 1u) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("median step"));
  const Outcome wrong = sherd({"train", "--quiet"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("no --config given"));
}

TEST_F(Results, EveryCommandHasQuiet) {
  for (const Declared& each : declared_commands()) {
    std::set<std::string> names;
    for (const Option& option : each.line.options())
      EXPECT_TRUE(names.insert(option.name).second) << option.name;
    EXPECT_TRUE(names.count("quiet")) << each.path();
  }
}

}  // namespace
}  // namespace sherd::cli
