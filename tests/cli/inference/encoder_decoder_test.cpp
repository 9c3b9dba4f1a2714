// An encoder in front of a decoder as a person has it: trained by spans, and by prompts and answers, which it
// then gives; in and out of Hugging Face's files.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

class EncoderDecoder : public Train {
 protected:
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  Outcome train_t5(std::vector<std::string> more) const {
    for (const char* set : {"model.type=t5", "model.num_layers=4", "model.encoder.num_layers=2"})
      more.insert(more.begin(), {"--set", set});
    return sherd(train(more));
  }
  std::vector<std::string> answers(const std::string& run, std::vector<std::string> more) const {
    more.insert(more.begin(), {"generate", "--checkpoint", in(run), "--prompts", in("prompts.jsonl"),
                               "--temperature", "0"});
    const Outcome got = sherd(more);
    EXPECT_EQ(got.code, 0) << got.err;
    std::vector<std::string> out;
    std::istringstream lines(got.out);
    for (std::string line; std::getline(lines, line);)
      out.push_back(nlohmann::json::parse(line).at("completion").get<std::string>());
    return out;
  }
};

/// The same spans whatever the number of ranks.
TEST_F(EncoderDecoder, LearnsSpansOnAnyNumberOfRanks) {
  std::vector<std::string> found[2];
  for (const int ranks : {1, 2}) {
    const std::string file = cat("ranks", ranks, ".jsonl");
    const Outcome got =
        train_t5({"--ranks", std::to_string(ranks), "--metrics", in(file), "--steps", "30", "--set",
                  "model.vocab_size=357", "--set", "model.seq_length=40", "--set",
                  "model.encoder.seq_length=30", "--set", "train_micro_batch_size_per_gpu=2"});
    ASSERT_EQ(got.code, 0) << got.err;
    found[ranks - 1] = metric(file, "loss");
    std::filesystem::remove_all(folder_ / "run");
  }
  ASSERT_EQ(found[0].size(), 30u);
  EXPECT_EQ(found[0], found[1]);
  EXPECT_LT(std::stod(found[0].back()), 0.8 * std::stod(found[0].front()));
  const auto refuses = [&](const char* what, std::vector<std::string> sets) {
    std::vector<std::string> options;
    for (const std::string& set : sets) options.insert(options.end(), {"--set", set});
    const Outcome got = train_t5(options);
    EXPECT_NE(got.code, 0);
    EXPECT_THAT(got.err, HasSubstr(what));
  };
  refuses("set it to 357 or more", {"model.seq_length=40", "model.encoder.seq_length=30"});
  refuses("set model.seq_length to 38",
          {"model.vocab_size=357", "model.seq_length=32", "model.encoder.seq_length=30"});
  refuses("does not tell prompts from answers",
          {"training.objective=seq2seq", "model.seq_length=40", "model.encoder.seq_length=30"});
  refuses("learns \"spans\" or \"seq2seq\"", {"training.objective=next_token"});
  refuses("has one text", {"data.packing=documents"});
  refuses("context ranks cannot share", {"parallel.context=2", "model.seq_length=40",
                                         "model.encoder.seq_length=30", "model.vocab_size=357"});
}

TEST_F(EncoderDecoder, AnswersWhatItLearnedByHeart) {
  const std::pair<const char*, const char*> pairs[] = {
      {"one", "uno"}, {"twenty", "veinte"}, {"a", "un"}, {"eight hens", "ocho"}};
  std::string lines, prompts;
  for (int i = 0; i < 100; ++i)
    lines +=
        cat(R"({"prompt": ")", pairs[i % 4].first, R"(", "completion": ")", pairs[i % 4].second, "\"}\n");
  for (const auto& [prompt, answer] : pairs) prompts += cat(R"({"prompt": ")", prompt, "\"}\n");
  write_text(folder_ / "pairs.jsonl", lines), write_text(folder_ / "prompts.jsonl", prompts);
  write_text(folder_ / "texts.jsonl", R"({"text": "one"})");
  const Outcome prepared =
      sherd({"prepare", "--seq2seq", "--input", in("pairs.jsonl"), "--tokenizer",
             "hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json", "--output", in("pairs")});
  ASSERT_EQ(prepared.code, 0) << prepared.err;
  // Stages between the first and the last learn of the lengths of prompts too.
  std::vector<double> losses[2];
  for (const int stages : {1, 4}) {
    const Outcome got = train_t5({"--steps",   "3",
                                  "--set",     "data.path=" + in("pairs"),
                                  "--set",     "training.objective=seq2seq",
                                  "--set",     "model.seq_length=20",
                                  "--set",     "model.encoder.seq_length=12",
                                  "--set",     "bf16.enabled=false",
                                  "--set",     cat("parallel.pipeline=", stages),
                                  "--ranks",   std::to_string(stages),
                                  "--set",     "zero_optimization.stage=1",
                                  "--metrics", in("stages.jsonl"),
                                  "--set",     "training.save_dir="});
    ASSERT_EQ(got.code, 0) << got.err;
    for (const std::string& loss : metric("stages.jsonl", "loss"))
      losses[stages / 4].push_back(std::stod(loss));
    std::filesystem::remove(folder_ / "stages.jsonl");
  }
  ASSERT_EQ(losses[0].size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(losses[0][i], losses[1][i], 1e-4) << i;
  const Outcome trained = train_t5({"--steps", "120", "--set", "data.path=" + in("pairs"), "--set",
                                    "training.objective=seq2seq", "--set", "model.seq_length=20", "--set",
                                    "model.encoder.seq_length=12", "--set", "optimizer.params.lr=0.01"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::vector<std::string> want{"uno", "veinte", "un", "ocho"};
  EXPECT_EQ(answers("run", {}), want);
  EXPECT_EQ(answers("run", {"--batch-size", "4"}), want);
  EXPECT_EQ(answers("run", {"--set", "parallel.tensor=2", "--ranks", "2"}), want);
  EXPECT_EQ(answers("run", {"--set", "parallel.pipeline=2", "--ranks", "2"}), want);
  EXPECT_EQ(answers("run", {"--ranks", "2"}), want) << "weights shared out";
  const Outcome one =
      sherd({"generate", "--checkpoint", in("run"), "--prompt", "twenty", "--temperature", "0"});
  EXPECT_EQ(one.out, "veinte\n");
  std::string tasks;
  for (const auto& [prompt, answer] : pairs)
    tasks += cat(R"({"context": ")", prompt, R"(", "choices": ["uno", "veinte", "un", "ocho"], "answer": ")",
                 answer, "\"}\n");
  write_text(folder_ / "tasks.jsonl", tasks);
  for (const char* ranks : {"1", "2"}) {
    const Outcome judged = sherd(
        {"evaluate", "--checkpoint", in("run"), "--tasks", in("tasks.jsonl"), "--json", "--ranks", ranks});
    ASSERT_EQ(judged.code, 0) << judged.err;
    EXPECT_EQ(nlohmann::json::parse(judged.out)["tasks"]["acc"], 1.0) << judged.out;
  }
  const Outcome exported = sherd({"export", in("run"), "--output", in("hf"), "--dtype", "fp32"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(read_text(folder_ / "hf" / "config.json"), HasSubstr("\"T5ForConditionalGeneration\""));
  const Outcome imported = sherd({"import", in("hf"), "--output", in("imported"), "--dtype", "bf16"});
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_EQ(answers("imported", {}), want);
  for (const std::vector<std::string>& refused :
       {std::vector<std::string>{"generate", "--checkpoint", in("run"), "--embed", "--prompt", "one"},
        {"generate", "--checkpoint", in("run"), "--chat", "--prompt", "one"},
        {"evaluate", "--checkpoint", in("run"), "--tasks", in("texts.jsonl")}}) {
    const Outcome got = sherd(refused);
    EXPECT_EQ(got.code, 2) << refused[3];
    EXPECT_THAT(got.err, HasSubstr("model.encoder")) << refused[3];
  }
}

}  // namespace
}  // namespace sherd::cli
