// Labels of tokens as a person has them: prepared, learned, judged, given, in and out of Hugging Face's
// files.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

constexpr const char* bert_tokenizer = "hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json";
constexpr const char* label_names = R"(["O", "B-NUM", "I-NUM", "B-LOC"])";

/// Lines whose numbers behind "row" or "jar" are entities, and whose places behind "in" are: what a word is
/// depends on those before it. Many words have several tokens.
std::string lines_of_words(int count, int first) {
  const char* const things[] = {"jar", "row", "shards"};
  const char* const places[] = {"Rome", "Hamburg", "Ulm"};
  std::string out;
  for (int i = first; i < first + count; ++i) {
    const std::string thing = things[i * 7 % 3], place = places[i * 5 / 3 % 3];
    const bool number = thing != "shards";
    out += cat(R"({"tokens": ["The", ")", thing, "\", \"", i % 9, "\", \"", i % 7, R"(", "lies", "in", ")",
               place, R"(", "or", ")", place, R"("], "ner_tags": ["O", 0, )", number ? R"("B-NUM")" : "0",
               ", ", number ? "2" : "0", R"(, "O", "O", "B-LOC", "O", "O"]})", "\n");
  }
  return out;
}

class TokenLabels : public Train {
 protected:
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  void prepare_words(const char* name, int count, int first) const {
    write_text(folder_ / cat(name, ".jsonl"), lines_of_words(count, first));
    const Outcome prepared =
        sherd({"prepare", "--input", in(cat(name, ".jsonl")), "--labels", "O,B-NUM,I-NUM,B-LOC",
               "--label-field", "ner_tags", "--tokenizer", bert_tokenizer, "--output", in(name)});
    ASSERT_EQ(prepared.code, 0) << prepared.err;
    EXPECT_THAT(prepared.out, HasSubstr(cat("words of ", count, " texts with one of 4 labels each")));
  }
  Outcome train_encoder(std::vector<std::string> sets, std::vector<std::string> more = {}) const {
    for (const char* set :
         {"model.type=bert", "model.dropout=0", "model.embedding_dropout=0", "model.attention_dropout=0",
          "model.seq_length=48", "model.head=token_classification", "optimizer.params.lr=0.003"})
      more.insert(more.end(), {"--set", set});
    for (const std::string& set : sets) more.insert(more.end(), {"--set", set});
    return sherd(train(more));
  }
  nlohmann::json judged(const std::string& run, const std::string& data,
                        std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"evaluate", "--checkpoint", in(run), "--data", in(data), "--json"});
    const Outcome out = sherd(more);
    EXPECT_EQ(out.code, 0) << out.err;
    return nlohmann::json::parse(out.out, nullptr, false);
  }
  std::string given(const std::string& run, std::vector<std::string> more) const {
    more.insert(more.begin(), {"generate", "--checkpoint", in(run), "--classify"});
    const Outcome out = sherd(more);
    EXPECT_EQ(out.code, 0) << out.err;
    return out.out;
  }
  /// The lines of a dataset are prompts, too, and find the same labels.
  void expect_given(double accuracy) const;
  /// Words of a text lie between white space; of a long one some are not seen.
  void expect_given_of_text() const;
  /// Out and in, and on other ranks.
  void expect_back(const nlohmann::json& report) const;
};

const std::string labels_set = cat("model.labels=", label_names);

void TokenLabels::expect_given(double accuracy) const {
  const std::string all = given("run", {"--prompts", in("test.jsonl")});
  std::istringstream lines(all), wanted(read_text(folder_ / "test.jsonl"));
  const auto names = nlohmann::json::parse(label_names);
  int right = 0, words = 0;
  for (std::string line, want; std::getline(lines, line) && std::getline(wanted, want);) {
    const nlohmann::json found = nlohmann::json::parse(line).at("words"), asked = nlohmann::json::parse(want);
    ASSERT_EQ(found.size(), asked.at("tokens").size());
    for (std::size_t i = 0; i < found.size(); ++i, ++words) {
      EXPECT_EQ(found[i].at("word"), asked["tokens"][i]);
      const nlohmann::json& tag = asked["ner_tags"][i];
      right += found[i].at("label") == (tag.is_number() ? names[tag.get<std::size_t>()] : tag);
      EXPECT_GT(found[i].at("probability").get<double>(), 0.25);
    }
  }
  EXPECT_EQ(words, 60 * 9);
  EXPECT_EQ(right, std::lround(60 * 9 * accuracy));
  EXPECT_EQ(given("run", {"--prompts", in("test.jsonl"), "--batch-size", "1"}), all);
}

void TokenLabels::expect_given_of_text() const {
  std::string text = "The  jar 3 4 lies in Ulm";
  for (int i = 0; i < 40; ++i) text += " of";
  const nlohmann::json own = nlohmann::json::parse(given("run", {"--prompt", text}));
  EXPECT_EQ(own.at("prompt"), text);
  EXPECT_EQ(own.at("tokens"), 48);
  EXPECT_EQ(own.at("words").size(), 47u);
  EXPECT_EQ(own["words"][1].at("word"), "jar");
  EXPECT_EQ(own["words"][2].at("label"), "B-NUM");
  EXPECT_TRUE(own["words"].back().at("label").is_null());
}

void TokenLabels::expect_back(const nlohmann::json& report) const {
  const std::string all = given("run", {"--prompts", in("test.jsonl")});
  const Outcome exported = sherd({"export", in("run"), "--output", in("hf"), "--dtype", "fp32"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  const std::string config = read_text(folder_ / "hf" / "config.json");
  EXPECT_THAT(config, HasSubstr("\"BertForTokenClassification\""));
  EXPECT_THAT(config, HasSubstr("\"3\": \"B-LOC\""));
  const Outcome imported = sherd({"import", in("hf"), "--output", in("imported"), "--dtype", "bf16"});
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_EQ(given("imported", {"--prompts", in("test.jsonl")}), all);
  for (const char* layout : {"parallel.tensor=2", "parallel.pipeline=2"}) {
    const nlohmann::json there = judged("run", "test", {"--set", layout, "--ranks", "2"});
    EXPECT_NEAR(there.at("accuracy").get<double>(), report["accuracy"].get<double>(), 0.01) << layout;
    EXPECT_NEAR(there.at("loss").get<double>(), report["loss"].get<double>(), 0.01) << layout;
  }
}

TEST_F(TokenLabels, AreLearnedJudgedAndGiven) {
  prepare_words("train", 400, 0), prepare_words("test", 60, 401);
  const Outcome trained = train_encoder({labels_set, "data.path=" + in("train"), "train_batch_size=8"},
                                        {"--steps", "120", "--ranks", "2"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const nlohmann::json report = judged("run", "test");
  EXPECT_EQ(report.at("tokens"), 60 * 9) << "words, not their further tokens";
  EXPECT_GT(report.at("accuracy").get<double>(), 0.95) << report.dump(2);
  EXPECT_GT(report.at("entities").at("f1").get<double>(), 0.9) << report.dump(2);
  EXPECT_EQ(report["entities"]["types"].at("LOC").at("entities"), 60);
  EXPECT_EQ(report["labels"].at("B-LOC").at("tokens"), 60);
  EXPECT_EQ(report["entities"]["types"].at("NUM").at("entities"), report["labels"]["B-NUM"]["tokens"]);
  const Outcome shown = sherd({"evaluate", "--checkpoint", in("run"), "--data", in("test")});
  EXPECT_THAT(shown.out, HasSubstr("\nentity  precision"));
  expect_given(report.at("accuracy").get<double>());
  expect_given_of_text();
  expect_back(report);
}

TEST_F(TokenLabels, TrainAlikeOnAllLayouts) {
  prepare_words("train", 100, 0);
  std::vector<std::string> first;
  for (const char* layout : {"parallel.tensor=1", "parallel.tensor=2", "parallel.pipeline=2"}) {
    const Outcome trained =
        train_encoder({labels_set, "data.path=" + in("train"), "bf16.enabled=false", layout,
                       "zero_optimization.stage=1", "training.save_dir=", "train_micro_batch_size_per_gpu=2"},
                      {"--ranks", "2", "--metrics", in("m.jsonl")});
    ASSERT_EQ(trained.code, 0) << trained.err;
    const std::vector<std::string> losses = metric("m.jsonl", "loss");
    ASSERT_EQ(losses.size(), 6u);
    if (first.empty()) first = losses;
    for (std::size_t i = 0; i < 6; ++i)
      EXPECT_NEAR(std::stod(losses[i]), std::stod(first[i]), 1e-4) << layout;
  }
}

TEST_F(TokenLabels, BeginFromEncodersWhoseHeadIsAnother) {
  prepare_words("train", 40, 0);
  const std::string path = "data.path=" + in("train");
  ASSERT_EQ(train_encoder({labels_set, path}, {"--steps", "1"}).code, 0);
  ASSERT_EQ(sherd({"export", in("run"), "--output", in("tokens")}).code, 0);
  const auto begin_from = [&](const std::string& folder) {
    const Outcome out = train_encoder(
        {labels_set, path, "training.init_from=" + folder, "training.save_dir=", "model.max_positions=48"},
        {"--steps", "1"});
    EXPECT_EQ(out.code, 0) << out.err;
    return out.err;
  };
  for (const char* same : {"run", "tokens"})
    EXPECT_EQ(begin_from(in(same)).find("begins anew"), std::string::npos) << same;
  // A model of masked tokens, and one whose labels are of texts and have the same names.
  std::filesystem::remove_all(folder_ / "run");
  for (const bool texts : {false, true}) {
    const std::string name = texts ? "texts" : "masked";
    write_text(folder_ / "t.jsonl", R"({"text": "The jar", "label": 0})"
                                    "\n"
                                    R"({"text": "A row", "label": 1})"
                                    "\n");
    std::vector<std::string> more{"prepare",     "--input",      in(texts ? "t.jsonl" : "text.txt"),
                                  "--tokenizer", bert_tokenizer, "--output",
                                  in(name)};
    if (texts) more.insert(more.end(), {"--labels", "O,B-NUM,I-NUM,B-LOC"});
    ASSERT_EQ(sherd(more).code, 0);
    const Outcome other =
        train_encoder({texts ? "model.head=sequence_classification" : "model.head=mlm",
                       texts ? labels_set : std::string("model.labels=[]"), "data.path=" + in(name),
                       "data.split=[1, 0]", "training.save_dir=" + in(name + "_run")},
                      {"--steps", "1"});
    ASSERT_EQ(other.code, 0) << other.err;
    const Outcome out = sherd({"export", in(name + "_run"), "--output", in(name + "_hf")});
    ASSERT_EQ(out.code, 0) << out.err;
    for (const char* kind : {"_run", "_hf"})
      EXPECT_THAT(begin_from(in(name + kind)), HasSubstr("head is not among them, and begins anew")) << name;
  }
}

TEST_F(TokenLabels, NameWhatDoesNotFit) {
  prepare_words("words", 20, 0);
  write_text(folder_ / "t.jsonl", R"({"text": "The jar", "label": 0})"
                                  "\n"
                                  R"({"text": "A row", "label": 1})"
                                  "\n");
  ASSERT_EQ(sherd({"prepare", "--input", in("t.jsonl"), "--labels", "O,B-NUM,I-NUM,B-LOC", "--tokenizer",
                   bert_tokenizer, "--output", in("texts")})
                .code,
            0);
  const std::string words = "data.path=" + in("words"), texts = "data.path=" + in("texts");
  const Outcome other_head = train_encoder({labels_set, words, "model.head=sequence_classification"});
  EXPECT_EQ(other_head.code, 2);
  EXPECT_THAT(other_head.err, HasSubstr("the tokens of '"));
  EXPECT_THAT(other_head.err, HasSubstr("set model.head to \"token_classification\""));
  EXPECT_THAT(train_encoder({labels_set, texts}).err,
              HasSubstr("set model.head to \"sequence_classification\""));
  EXPECT_THAT(train_encoder({R"(model.labels=["a", "b"])", words}).err,
              HasSubstr("and model.labels to these"));
  EXPECT_THAT(train_encoder({words}).err, HasSubstr("\"token_classification\" needs labels"));
  EXPECT_THAT(train_encoder({words, labels_set, "model.causal=true"}).err, HasSubstr("is for encoders"));
  EXPECT_THAT(train_encoder({words, labels_set, "training.objective=mlm"}).err, HasSubstr("go together"));
  EXPECT_THAT(train_encoder({words, labels_set, "training.adapter.type=lora"}).err,
              HasSubstr("train a classifier whole"));
  EXPECT_THAT(train_encoder({words, labels_set, "parallel.context=2"}, {"--ranks", "2"}).err,
              HasSubstr("are kept apart on ranks that have whole ones"));
  ASSERT_EQ(train_encoder({labels_set, words, "data.split=[1, 0]"}, {"--steps", "1"}).code, 0);
  const auto fails = [&](std::vector<std::string> more) {
    more.insert(more.begin() + 1, {"--checkpoint", in("run")});
    const Outcome out = sherd(more);
    EXPECT_NE(out.code, 0);
    return out.err;
  };
  EXPECT_THAT(fails({"evaluate", "--data", in("texts")}), HasSubstr("which are of tokens, or none"));
  write_text(folder_ / "p.jsonl", R"({"tokens": ["The", "jar"]})");
  write_text(folder_ / "q.jsonl", R"({"tokens": "The jar"})");
  write_text(folder_ / "r.jsonl", R"({"text": "The", "text_pair": "jar"})");
  EXPECT_THAT(fails({"generate", "--embed", "--prompts", in("p.jsonl")}),
              HasSubstr("\"tokens\" are for --classify by a model whose labels are of tokens"));
  EXPECT_THAT(fails({"generate", "--classify", "--prompts", in("q.jsonl")}),
              HasSubstr("is no list of words"));
  EXPECT_THAT(fails({"generate", "--classify", "--prompts", in("r.jsonl")}),
              HasSubstr("is for models whose labels are of texts"));
}

}  // namespace
}  // namespace sherd::cli
