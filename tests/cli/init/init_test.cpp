// `sherd init`: the file that it writes trains.
#include <nlohmann/json.hpp>

#include "base/cpu_isa.h"
#include "cli/pseudo_terminal.h"
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using sherd::testing::PseudoTerminal;
using ::testing::Not;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

class Init : public Train {
 protected:
  std::string path(const char* name) const { return (folder_ / name).string(); }
  /// The command on the prepared data, two steps, small; `more` says what else.
  Words init(const Words& more = {}) const {
    Words out{"init",    "--output", path("made.json"), "--data", prefix(),     "--seq-length", "16",
              "--batch", "4",        "--steps",         "2",      "--save-dir", path("made")};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  Json made() const { return Json::parse(read_text(folder_ / "made.json")); }
  /// Trains what was made, and checks that it took both steps.
  void expect_trains(const Words& more = {}) const {
    const Outcome told = sherd({"estimate", "--config", path("made.json")});
    EXPECT_EQ(told.code, 0) << told.err;
    Words words{"train", "--config", path("made.json"), "--metrics", path("made.jsonl")};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome trained = sherd(words);
    EXPECT_EQ(trained.code, 0) << trained.err;
    EXPECT_EQ(metric("made.jsonl", "step"), (Words{"1", "2"}));
  }
  void refuses(const Words& words, int code, const std::string& text) const {
    const Outcome outcome = sherd(words);
    EXPECT_EQ(outcome.code, code) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_EQ(count(outcome.err, "\n"), 1u) << outcome.err;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "made.json"));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "made.json.draft"));
  }
  /// A model in Hugging Face's files, of two layers.
  std::string published() const {
    const std::string folder = path("hf");
    require(sherd(train({"--steps", "1", "--set", "model.max_positions=64"})).code == 0,
            "the model that is to be published trains");
    require(sherd({"export", path("run"), "--output", folder}).code == 0, "it is exported");
    return folder;
  }
};

TEST_F(Init, WritesANewModelThatTrains) {
  const Outcome outcome = sherd(init());  // no terminal: nobody is asked
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* text : {"a model of ", "precision: ", "memory: 1 rank, ", "next: sherd train --config "})
    EXPECT_THAT(outcome.out, HasSubstr(text));
  EXPECT_THAT(outcome.out, Not(HasSubstr("sherd prepare")));
  const Json config = made();  // strict JSON: notes are keys
  EXPECT_THAT(config.at("//").get<std::string>(), HasSubstr("sherd init"));
  EXPECT_THAT(config.at("//zero_optimization").get<std::string>(), HasSubstr("nothing has to move"));
  EXPECT_EQ(config.at("model").at("hidden_size"), 320);
  EXPECT_FALSE(config.at("model").contains("vocab_size"));
  EXPECT_EQ(config.contains("bf16"), cpu_has_bf16_products());
  EXPECT_EQ(config.at("zero_optimization").at("stage"), 0);
  expect_trains();
  const Outcome again = sherd(init());
  EXPECT_EQ(again.code, 2);
  EXPECT_THAT(again.err, HasSubstr("is there already: give --output another name"));
}

TEST_F(Init, ChoosesByTheMemoryAtHand) {
  const Words large = {"--from", "125m", "--ranks", "2", "--memory", "2GB"};
  const Outcome outcome = sherd(init(large));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json config = made();
  EXPECT_THAT(config.at("//zero_optimization").get<std::string>(),
              HasSubstr("as it stood the run would take "));
  EXPECT_THAT(outcome.out, HasSubstr("memory: 2 ranks, 1.86 GiB of this machine at hand: as it stood"));
  // The choice is held against the same memory.
  const Outcome told =
      shell(cat("env SHERD_MACHINE_MEMORY=2GB ",
                joined({"estimate", "--ranks", "2", "--json", "--config", path("made.json")})));
  EXPECT_EQ(told.code, 0) << told.out;
  EXPECT_GT(config.dump().size(), 100u);
}

TEST_F(Init, SaysWhatFitsNowhere) {
  refuses(init({"--from", "7b", "--memory", "100MiB"}), 1, "choose a smaller model");
}

TEST_F(Init, CountsWithoutData) {
  Words words = init();
  words[4] = path("none");
  const Outcome outcome = sherd(words);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(made().at("model").at("vocab_size"), 32000);
  EXPECT_THAT(outcome.out,
              HasSubstr("next: sherd prepare --input YOUR_TEXTS --tokenizer spm-train:32000 --output "));
  EXPECT_EQ(sherd({"estimate", "--config", path("made.json")}).code, 0);
}

TEST_F(Init, TrainsBesideAPublishedModel) {
  const std::string hf = published();
  for (const auto& [method, base] : {std::pair("lora", ""), {"few-bit", "nf4"}, {"full", ""}}) {
    SCOPED_TRACE(method);
    std::filesystem::remove(folder_ / "made.json");
    std::filesystem::remove_all(folder_ / "made");
    const Outcome outcome = sherd(init({"--from", hf, "--method", method}));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const Json training = made().at("training");
    EXPECT_EQ(training.at("init_from"), hf);
    EXPECT_EQ(training.contains("adapter"), std::string(method) != "full");
    if (*base) {
      EXPECT_EQ(training.at("adapter").at("base_format"), base);
    }
    expect_trains();
  }
}

TEST_F(Init, LearnsToAnswerAndToPrefer) {
  const std::string hf = published();
  std::string talks, pairs;
  for (int i = 0; i < 60; ++i) {
    talks += cat(R"({"prompt": "say )", i, R"(", "completion": " done )", i, "\"}\n");
    pairs += cat(R"({"prompt": "say )", i, R"(", "chosen": " done", "rejected": " no )", i, "\"}\n");
  }
  write_text(folder_ / "talks.jsonl", talks), write_text(folder_ / "pairs.jsonl", pairs);
  for (const char* kind : {"talks", "pairs"})
    ASSERT_EQ(
        sherd({"prepare", "--input", path(kind) + ".jsonl", "--tokenizer", "byte", "--output", path(kind)})
            .code,
        0);
  const auto words = [&](const char* objective, const char* data) {
    Words out = init({"--from", hf, "--objective", objective});
    out[4] = path(data), out[6] = "64";
    return out;
  };
  // Data of another kind are found out before anything is written.
  refuses(words("preferences", "talks"), 2, "objective");
  refuses(words("instruction", "pairs"), 2, "objective");
  for (const auto& [objective, data] : {std::pair("instruction", "talks"), {"preferences", "pairs"}}) {
    SCOPED_TRACE(objective);
    std::filesystem::remove(folder_ / "made.json");
    std::filesystem::remove_all(folder_ / "made");
    const Outcome outcome = sherd(words(objective, data));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(made().at("data").at("packing"), "documents");
    expect_trains();
  }
  EXPECT_EQ(made().at("training").at("objective"), "dpo");
  EXPECT_EQ(metric("made.jsonl", "rewards/margins").size(), 2u);
}

TEST_F(Init, SaysWhichOptionIsWrong) {
  refuses(init({"--from", "12parsecs"}), 2, "none of the sizes 10m, 60m");
  refuses(init({"--objective", "preference"}), 2, "did you mean 'preferences'?");
  refuses(init({"--objective", "preferences"}), 2, "give --from a folder");
  refuses(init({"--method", "lora"}), 2, "give --from a folder");
  refuses(init({"--batch", "0"}), 2, "--batch takes a whole number from 1");
  refuses(init({"--memory", "lots"}), 2, "--memory takes a size as 8GB");
  Words elsewhere = init();
  elsewhere[2] = path("none/made.json");
  refuses(elsewhere, 1, "none");
}

TEST_F(Init, AsksAtATerminalForWhatNoOptionGives) {
  PseudoTerminal terminal(joined({"init", "--steps", "2", "--seq-length", "16", "--save-dir", path("made"),
                                  "--output", path("made.json")}));
  ASSERT_TRUE(terminal.shows("or a folder of weights [10m]: ")) << terminal.shown();
  terminal.type("nothing\n");
  ASSERT_TRUE(terminal.shows("none of the sizes"));
  ASSERT_TRUE(terminal.shows("[10m]: "));
  terminal.type("\n");
  ASSERT_TRUE(terminal.shows("Learn: pretraining, instruction or preferences [pretraining]: "));
  terminal.type("\n");
  ASSERT_TRUE(terminal.shows("[data/corpus]: "));  // a new model has one method
  terminal.type(prefix() + "\n");
  ASSERT_TRUE(terminal.shows("Samples of a step [16]: "));
  terminal.type(" 4 \n");
  ASSERT_TRUE(terminal.shows("[all]: "));
  terminal.type("4GB\n");
  EXPECT_EQ(terminal.end(60), 0) << terminal.shown();
  EXPECT_THAT(terminal.shown(), Not(HasSubstr("Tokens of a sample")));
  EXPECT_EQ(made().at("train_batch_size"), 4);
  expect_trains();
}

TEST_F(Init, WritesNothingWhereTheAnswersEnd) {
  PseudoTerminal terminal(joined({"init", "--output", path("made.json")}));
  ASSERT_TRUE(terminal.shows("[10m]: "));
  terminal.type("\x04");
  EXPECT_EQ(terminal.end(), 2);
  EXPECT_THAT(terminal.shown(), HasSubstr("give --yes"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "made.json"));
}

}  // namespace
}  // namespace sherd::cli
