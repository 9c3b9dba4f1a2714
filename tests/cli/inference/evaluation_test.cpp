// `sherd evaluate`: its files, its metrics, and the program as a person runs it.
#include "cli/inference/evaluation.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/train_fixture.h"
#include "support/expect_error.h"

namespace sherd::cli {
namespace {

using Json = nlohmann::json;
using sherd::testing::expect_error;

double value_of(const TaskMetrics& task, const std::string& name) {
  for (const Metric& metric : task.metrics())
    if (metric.name == name) return metric.value;
  ADD_FAILURE() << "no metric " << name;
  return 0;
}

TaskExample choice(std::vector<std::string> choices, std::size_t answer) {
  TaskExample out;
  out.continuations = std::move(choices), out.answer = answer;
  return out;
}

TEST(Metrics, OfChoicesTakeTheLikeliestAlsoPerCharacter) {
  TaskMetrics task;
  // 2 characters against 10, one of which has two bytes: -3 / 2 < -8 / 10.
  const TaskExample example = choice({" ab", " abcdefghi\xC3\xA9"}, 1);
  const Verdict verdict = judge(example, {{-3, 1, true}, {-8, 4, false}});
  EXPECT_EQ(verdict.choice, 0u);
  EXPECT_EQ(verdict.choice_by_length, 1u);
  task.add(example, verdict);
  task.add(choice({"x", "y", "z"}, 2),
           judge(choice({"x", "y", "z"}, 2), {{-2, 1, 0}, {-3, 1, 0}, {-1, 1, 0}}));
  task.add(choice({"x", "y"}, 0), judge(choice({"x", "y"}, 0), {{-2, 1, 0}, {-1, 1, 0}}));
  EXPECT_DOUBLE_EQ(value_of(task, "acc"), 1.0 / 3);
  EXPECT_DOUBLE_EQ(value_of(task, "acc_norm"), 2.0 / 3);
  EXPECT_NEAR(*task.metrics()[0].error, std::sqrt(1.0 / 3 * 2 / 3 / 2), 1e-15);  // sample deviation / sqrt 3
}

TEST(Metrics, OfCompletionsAndTexts) {
  TaskExample completion;
  completion.continuations = {" word"};
  TaskMetrics task;
  task.add(completion, judge(completion, {{-2, 2, true}}));
  task.add(completion, judge(completion, {{-4, 1, false}}));
  EXPECT_DOUBLE_EQ(value_of(task, "acc"), 0.5);
  EXPECT_DOUBLE_EQ(value_of(task, "perplexity"), std::exp(3));
  EXPECT_DOUBLE_EQ(value_of(task, "token_perplexity"), std::exp(2));
  EXPECT_DOUBLE_EQ(value_of(task, "loss"), 2);

  TaskExample text;
  text.is_text = true, text.continuations = {"one  two\nthr\xC3\xA9\xC3\xA9 "};
  TaskMetrics texts;
  texts.add(text, judge(text, {{-32, 8, false}}));
  EXPECT_DOUBLE_EQ(value_of(texts, "word_perplexity"), std::exp(32.0 / 4));  // re.split(r"\s+") gives 4 parts
  EXPECT_DOUBLE_EQ(value_of(texts, "byte_perplexity"), std::exp(32.0 / 17));
  EXPECT_DOUBLE_EQ(value_of(texts, "bits_per_byte"), 32.0 / 17 / std::log(2));
  EXPECT_DOUBLE_EQ(value_of(texts, "token_perplexity"), std::exp(4));
}

TEST(EvaluationWindows, EncodeAContextAndWhatFollowsAsOneText) {
  const auto bytes = data::make_byte_tokenizer();
  const auto windows = windows_of(*bytes, "ab  ", "cd", 16);
  ASSERT_EQ(windows.size(), 1u);
  EXPECT_EQ(windows[0].tokens, (std::vector<std::int32_t>{'a', 'b', ' ', ' ', 'c', 'd'}));
  EXPECT_EQ(windows[0].first, 2);  // the spaces are what follows
  const auto without = windows_of(*bytes, "", "cd", 16);
  ASSERT_EQ(without.size(), 1u);
  EXPECT_EQ(without[0].tokens, (std::vector<std::int32_t>{256, 'c', 'd'}));
  EXPECT_EQ(without[0].first, 1);
}

/// "ab" and "cd" are a token each, and so is "bc", which comes first where all three could.
std::shared_ptr<const data::Tokenizer> pairs(const std::string& begin) {
  const Json file{{"model",
                   {{"type", "BPE"},
                    {"vocab",
                     {{"<s>", 0},
                      {"a", 1},
                      {"b", 2},
                      {"c", 3},
                      {"d", 4},
                      {"bc", 5},
                      {"ab", 6},
                      {"</s>", 7},
                      {"\u3000", 8}}},
                    {"merges", {"b c", "a b"}}}},
                  {"added_tokens",
                   {{{"id", 0}, {"content", "<s>"}, {"special", true}},
                    {{"id", 7}, {"content", "</s>"}, {"special", true}}}}};
  return data::make_tokenizer("hf:x?eod=</s>&bos=" + begin, file.dump());
}
using Ids = std::vector<std::int32_t>;

/// The windows that TemplateLM._encode_pair(), .loglikelihood() and HFLM.loglikelihood_rolling() of
/// lm-evaluation-harness 0.4.13 give for these tokens.
TEST(EvaluationWindows, HaveTheTokensOfTheHarness) {
  const auto plain = pairs(""), begins = pairs("<s>");
  const auto expect = [](const data::Tokenizer& tokenizer, const std::string& context,
                         const std::string& rest, const Ids& ids, std::int64_t first) {
    const auto windows = windows_of(tokenizer, context, rest, 16);
    ASSERT_EQ(windows.size(), 1u);
    EXPECT_EQ(windows[0].tokens, ids) << context << "|" << rest;
    EXPECT_EQ(windows[0].first, first) << context << "|" << rest;
  };
  expect(*plain, "ab", "cd", {6, 5, 4},
         1);  // whole: a bc d; of it what is behind one token stands behind "ab"
  expect(*begins, "ab", "cd", {0, 6, 5, 4}, 2);
  expect(*plain, "da", "b", {4, 6}, 1);                // whole: d ab, no more than the context alone
  expect(*plain, "a\xe3\x80\x80", "d", {1, 8, 4}, 1);  // an ideographic space is white to Python
  expect(*begins, "", "<s>ad", {0, 1, 4}, 1);
  expect(*plain, "", "</s>ad", {7, 1, 4}, 1);
  expect(*plain, "", "ad", {7, 1, 4}, 1);
  const auto text = [](const data::Tokenizer& tokenizer, const std::string& of) {
    const auto windows = text_windows(tokenizer, of, 16);
    EXPECT_EQ(windows.at(0).first, 1);
    return windows.at(0).tokens;
  };
  EXPECT_EQ(text(*plain, "ad"), (Ids{7, 1, 4}));
  EXPECT_EQ(text(*begins, "ad"), (Ids{0, 0, 1, 4}));
  EXPECT_EQ(text(*begins, "<s>ad"), (Ids{0, 0, 1, 4}));
  expect_error(ErrorKind::data, "nothing to score", [&] { windows_of(*begins, "", "", 16); });
}

/// re.split(r"\s+", text) of Python.
TEST(Metrics, CountWordsAsPythonDoes) {
  TaskExample text;
  text.is_text = true, text.continuations = {
                           "a\u3000b\u00a0\u2028c\x1f"
                           "d\u200b"
                           "e"};
  TaskMetrics texts;
  texts.add(text, judge(text, {{-32, 8, false}}));
  EXPECT_DOUBLE_EQ(value_of(texts, "word_perplexity"), std::exp(32.0 / 4));
}

TEST(ExamplesFile, IsReadByKindAndRefusedByLine) {
  const TempFolder folder;
  const auto read = [&](const std::string& text) {
    write_text(folder / "quiz.jsonl", text);
    return read_examples(folder / "quiz.jsonl");
  };
  const auto all = read(R"({"context": "c", "choices": ["a", "b"], "answer": "b", "id": 7}

{"task": "other", "context": "c", "choices": ["a", "b"], "answer": 0}
{"task": "ends", "context": "c", "completion": "d"}
{"task": "texts", "text": "t"}
)");
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].task, "quiz");
  EXPECT_EQ(all[0].answer, 1u);
  EXPECT_EQ(all[1].task, "other");
  EXPECT_EQ(all[1].answer, 0u);
  EXPECT_EQ(all[1].line, 3u);
  EXPECT_EQ(all[2].continuations, std::vector<std::string>{"d"});
  EXPECT_FALSE(all[2].answer || all[2].is_text);
  EXPECT_TRUE(all[3].is_text);
  for (const auto& [line, what] : std::vector<std::pair<std::string, std::string>>{
           {R"({"contxt": "c", "choices": ["a", "b"], "answer": 0})", R"(has "contxt" and no "context")"},
           {R"({"prompt": "c", "completion": "d"})", R"(has "prompt" and no "context")"},
           {R"({"question": "q", "choices": ["a", "b"], "answer": 0})", R"(has "question" and no "context")"},
           {R"({"context": "", "prompt": "q", "choices": ["a", "b"], "answer": 0})",
            R"(has "prompt" and no "context")"},
           {R"({"instruction": "q", "completion": "a"})", R"(has "instruction" and no "context")"},
           {"[1]", ":1 is no JSON object"},
           {R"({"text": NaN})", ":1 is no JSON: "},
           {R"({"text": "\ud83e"})", "surrogate"},
           {"{\"context\": \"c\"}", "has none of \"choices\", \"completion\" and \"text\""},
           {"{\"text\": \"c\", \"completion\": \"d\"}", "has more than one of"},
           {"{\"text\": \"c\", \"context\": \"d\"}", "a \"text\" is scored whole"},
           {"{\"text\": \"\"}", "\"text\" is empty"},
           {"{\"text\": 3}", "\"text\" is no text: 3"},
           {"{\"choices\": [\"a\"], \"answer\": 0}", "two texts or more"},
           {"{\"choices\": [\"a\", \"\"], \"answer\": 0}", "none of them empty"},
           {"{\"choices\": [\"a\", \"b\"]}", "no \"answer\""},
           {"{\"choices\": [\"a\", \"b\"], \"answer\": 2}", "there are choices 0 to 1"},
           {"{\"choices\": [\"a\", \"b\"], \"answer\": \"c\"}", "none of the choices: \"c\""},
           {"{\"text\": \"a\"}\n{\"completion\": \"a\"}",
            ":2 has a completion, and task 'quiz' lines with a text"},
           {"", "holds no examples"}})
    expect_error(ErrorKind::data, what, [&, &line = line] { read(line); });
}

class EvaluateProgram : public Train {
 protected:
  void SetUp() override {
    const Outcome trained = sherd(train({"--set", "training.steps=300", "--set", "optimizer.params.lr=0.01",
                                         "--set", "model.seq_length=64"}));
    ASSERT_EQ(trained.code, 0) << trained.err;
    std::string tasks;
    for (const char* jar : {"jar", "row"})
      tasks += cat(
          R"({"task": "words", "context": "The 3 shards of", "choices": [" jar 4", " qqq 4"], "answer": )",
          jar == std::string("jar") ? 0 : 1, "}\n");
    tasks += R"({"task": "ends", "context": "The 5 shards of ", "completion": "jar"})";
    tasks += "\n" + Json{{"task", "texts"}, {"text", text()}}.dump() + "\n";
    write_text(folder_ / "tasks.jsonl", tasks);
  }
  /// Longer than the model's sequences.
  static std::string text() {
    std::string out;
    for (int i = 0; i < 9; ++i)
      out += cat("The ", i % 7, " shards of jar ", i % 13, " lie in row ", i % 5, ".");
    return out;
  }
  Json evaluate(const std::vector<std::string>& more) const {
    std::vector<std::string> all{"evaluate", "--checkpoint", (folder_ / "run").string(), "--json"};
    all.insert(all.end(), more.begin(), more.end());
    const Outcome got = sherd(all);
    EXPECT_EQ(got.code, 0) << got.err;
    return got.code == 0 ? Json::parse(got.out) : Json();
  }
};

TEST_F(EvaluateProgram, ScoresTasksAlikeInEveryLayout) {
  const std::string tasks = (folder_ / "tasks.jsonl").string(), output = (folder_ / "out.jsonl").string();
  const Json one = evaluate({"--tasks", tasks, "--output", output});
  EXPECT_EQ(one["words"]["examples"], 2);
  EXPECT_EQ(one["words"]["acc"], 0.5);
  EXPECT_EQ(one["ends"]["acc"], 1.0);
  EXPECT_LT(one["texts"]["loss"].get<double>(), 2);  // bytes of a text like those that it learned
  EXPECT_EQ(one["texts"]["tokens"], text().size());
  std::istringstream lines(read_text(output));
  std::vector<Json> details;
  for (std::string line; std::getline(lines, line);) details.push_back(Json::parse(line));
  ASSERT_EQ(details.size(), 4u);
  EXPECT_EQ(details[1]["line"], 2);
  EXPECT_EQ(details[1]["choice"], 0);
  EXPECT_EQ(details[1]["answer"], 1);
  EXPECT_EQ(details[1]["tokens"], Json({6, 6}));
  EXPECT_GT(details[0]["log_likelihoods"][0], details[0]["log_likelihoods"][1]);
  EXPECT_EQ(details[2]["greedy"], Json({true}));
  for (const std::vector<std::string>& layout :
       std::vector<std::vector<std::string>>{{"--batch-tokens", "1"},
                                             {"--ranks", "2"},
                                             {"--offload", "cpu"},
                                             {"--set", "parallel.tensor=2"},
                                             {"--set", "parallel.pipeline=2", "--ranks", "4"}}) {
    std::vector<std::string> more{"--tasks", tasks};
    more.insert(more.end(), layout.begin(), layout.end());
    const Json other = evaluate(more);
    EXPECT_NEAR(other["texts"]["loss"].get<double>(), one["texts"]["loss"].get<double>(), 2e-3) << layout[1];
    EXPECT_EQ(other["words"]["acc"], 0.5) << layout[1];
    EXPECT_EQ(other["ends"]["acc"], 1.0) << layout[1];
    if (layout[0] == "--ranks") {
      EXPECT_EQ(other, one) << "ranks share texts out, and nothing else";
    }
    EXPECT_EQ(other["ends"]["tokens"], one["ends"]["tokens"]) << layout[1];
  }
  const Outcome table = sherd({"evaluate", "--checkpoint", (folder_ / "run").string(), "--tasks", tasks});
  EXPECT_THAT(table.out, HasSubstr("words  acc                   0.5000     0.5000"));
  EXPECT_THAT(table.err, HasSubstr("evaluated 4 of 4 examples"));
}

TEST_F(EvaluateProgram, ScoresADatasetsDocumentsAsTheirTexts) {
  write_text(folder_ / "two.txt", text() + "\n\n\nThe 2 shards\n");
  ASSERT_EQ(sherd({"prepare", "--input", (folder_ / "two.txt").string(), "--tokenizer", "byte", "--output",
                   (folder_ / "two").string()})
                .code,
            0);
  const std::string prefix = (folder_ / "two").string();
  const Json got = evaluate({"--data", prefix, "--ranks", "2"})[prefix];
  EXPECT_GT(got["tokens"].get<std::size_t>(), text().size() + 12);
  EXPECT_EQ(got["examples"], 2);
  EXPECT_LT(got["loss"].get<double>(), 3);
  EXPECT_NEAR(got["token_perplexity"].get<double>(), std::exp(got["loss"].get<double>()), 1e-9);
  EXPECT_LT(evaluate({"--data", prefix, "--limit", "1"})[prefix]["tokens"], got["tokens"]);
}

TEST_F(EvaluateProgram, MaskedTokensDoNotCount) {
  write_text(folder_ / "pairs.jsonl", R"({"prompt": "The 3 shards", "completion": " of jar"})");
  const Outcome prepared = sherd({"prepare", "--input", (folder_ / "pairs.jsonl").string(), "--tokenizer",
                                  "byte", "--output", (folder_ / "pairs").string()});
  ASSERT_EQ(prepared.code, 0) << prepared.err;
  const std::string prefix = (folder_ / "pairs").string();
  const Json got = evaluate({"--data", prefix})[prefix];
  EXPECT_EQ(got["tokens"], 8);  // " of jar", and the end of the document
  // By itself, and not behind the end of another: as the task, and the end.
  write_text(folder_ / "end.jsonl", R"({"prompt": "The 3 shards of jar", "completion": ""})");
  ASSERT_EQ(sherd({"prepare", "--input", (folder_ / "end.jsonl").string(), "--tokenizer", "byte", "--output",
                   (folder_ / "end").string()})
                .code,
            0);
  const std::string end = (folder_ / "end").string(), task = (folder_ / "task.jsonl").string();
  write_text(task, R"({"context": "The 3 shards", "completion": " of jar"})");
  const double of_end = evaluate({"--data", end})[end]["loss"].get<double>(),
               of_task = evaluate({"--tasks", task})["task"]["loss"].get<double>();
  EXPECT_NEAR(8 * got["loss"].get<double>(), 7 * of_task + of_end, 1e-4);
}

TEST_F(EvaluateProgram, RefusesWhatItCannotScore) {
  const std::string run = (folder_ / "run").string(), tasks = (folder_ / "tasks.jsonl").string();
  const auto evaluate_with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"evaluate", "--checkpoint", run});
    return sherd(more);
  };
  EXPECT_THAT(evaluate_with({}).err, HasSubstr("give --tasks FILE or --data PREFIX"));
  EXPECT_THAT(evaluate_with({"--tasks", tasks, "--data", prefix()}).err, HasSubstr("not both"));
  EXPECT_THAT(evaluate_with({"--data", prefix(), "--output", "x"}).err,
              HasSubstr("--output goes with --tasks"));
  EXPECT_THAT(evaluate_with({"--tasks", tasks, "--output", "/nowhere/x"}).err, HasSubstr("cannot write"));
  EXPECT_THAT(evaluate_with({"--tasks", tasks, "--output", tasks}).err, HasSubstr("which would be lost"));
  EXPECT_GT(read_text(tasks).size(), 0u);
  EXPECT_THAT(evaluate_with({"--tasks", tasks, "--set", "parallel.context=2"}).err,
              HasSubstr("parallel.context is 2"));
  std::string numbers;
  for (int i = 0; i < 3000; ++i) numbers += cat(i * 7919 % 10007, i % 9 == 0 ? ".\n" : " ");
  write_text(folder_ / "numbers.txt", numbers);
  const Outcome other = sherd({"prepare", "--input", (folder_ / "numbers.txt").string(), "--tokenizer",
                               "spm-train:300", "--output", (folder_ / "spm").string()});
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_THAT(evaluate_with({"--data", (folder_ / "spm").string()}).err,
              HasSubstr("prepare the text with that one"));
}

}  // namespace
}  // namespace sherd::cli
