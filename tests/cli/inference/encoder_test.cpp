// Encoders as a person has them: trained by masked tokens, embedding texts, in and out of Hugging Face's
// files.
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

class Encoder : public Train {
 protected:
  Encoder() {
    const Outcome prepared =
        sherd({"prepare", "--input", in("text.txt"), "--tokenizer",
               "hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json", "--output", in("masked")});
    require(prepared.code == 0, prepared.err);
  }
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  /// Trains BERT's style on the texts.
  Outcome train_bert(std::vector<std::string> more = {}) const {
    for (const char* set :
         {"model.type=bert", "model.dropout=0", "model.embedding_dropout=0", "model.attention_dropout=0"})
      more.insert(more.end(), {"--set", set});
    more.insert(more.begin(), {"--set", "data.path=" + in("masked")});
    return sherd(train(more));
  }
  /// A few pairs of texts with labels.
  void prepare_labelled() const;
  /// The lines of an embedding file.
  static std::vector<std::vector<double>> embeddings(const std::string& lines) {
    std::vector<std::vector<double>> out;
    std::istringstream in(lines);
    for (std::string line; std::getline(in, line);)
      out.push_back(nlohmann::json::parse(line).at("embedding").get<std::vector<double>>());
    return out;
  }
  static void expect_alike(const std::vector<std::vector<double>>& a,
                           const std::vector<std::vector<double>>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].size(), b[i].size());
      for (std::size_t k = 0; k < a[i].size(); ++k) EXPECT_NEAR(a[i][k], b[i][k], 0.02) << i << ", " << k;
    }
  }
};

/// The same masks whatever the number of ranks, and others in each epoch.
TEST_F(Encoder, LearnsMaskedTokensOnAnyNumberOfRanks) {
  const std::vector<std::string> longer{"--steps", "40", "--metrics", in("one.jsonl")};
  const Outcome one = train_bert(longer);
  ASSERT_EQ(one.code, 0) << one.err;
  const std::vector<std::string> losses = metric("one.jsonl", "loss");
  ASSERT_EQ(losses.size(), 40u);
  EXPECT_LT(std::stod(losses.back()), 0.8 * std::stod(losses.front()));
  std::filesystem::remove_all(folder_ / "run");
  for (const std::string packing : {"stream", "documents"}) {
    std::vector<std::string> found[2];
    for (const int ranks : {1, 2}) {
      const std::string file = cat("ranks", ranks, packing, ".jsonl");
      const Outcome got = train_bert({"--ranks", std::to_string(ranks), "--metrics", in(file), "--set",
                                      "data.packing=" + packing, "--set", "training.whole_word_mask=true",
                                      "--set", "train_micro_batch_size_per_gpu=2"});
      ASSERT_EQ(got.code, 0) << got.err;
      found[ranks - 1] = metric(file, "loss");
      std::filesystem::remove_all(folder_ / "run");
    }
    ASSERT_EQ(found[0].size(), 6u);
    EXPECT_EQ(found[0], found[1]) << packing;
  }
}

TEST_F(Encoder, EmbedsTextsAndComesBackFromHuggingFacesFiles) {
  const Outcome trained = train_bert();
  ASSERT_EQ(trained.code, 0) << trained.err;
  write_text(folder_ / "texts.txt", "The 3 shards of jar 5\nrow 2\nThe 3 shards of jar 5.\nlie in row 4.\n");
  const auto embed = [&](const std::string& run, std::vector<std::string> more) {
    more.insert(more.begin(), {"generate", "--checkpoint", in(run), "--embed", "--prompts", in("texts.txt")});
    const Outcome out = sherd(more);
    EXPECT_EQ(out.code, 0) << out.err;
    return embeddings(out.out);
  };
  const auto together = embed("run", {});
  ASSERT_EQ(together.size(), 4u);
  ASSERT_EQ(together[0].size(), 32u);
  EXPECT_NE(together[0], together[1]);
  EXPECT_EQ(embed("run", {"--batch-size", "1"}), together)
      << "no text sees those beside it, nor what fills them up";
  expect_alike(embed("run", {"--set", "parallel.tensor=2", "--ranks", "2"}), together);
  expect_alike(embed("run", {"--set", "parallel.pipeline=2", "--ranks", "2"}), together);
  const auto first = embed("run", {"--pooling", "cls"});
  EXPECT_NE(first, together);
  EXPECT_NE(embed("run", {"--pooling", "last"}), first);
  const Outcome exported = sherd({"export", in("run"), "--output", in("hf"), "--dtype", "fp32"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(read_text(folder_ / "hf" / "config.json"), HasSubstr("\"BertForMaskedLM\""));
  const Outcome imported = sherd({"import", in("hf"), "--output", in("imported"), "--dtype", "bf16"});
  ASSERT_EQ(imported.code, 0) << imported.err;
  expect_alike(embed("imported", {}), together);
  // An error for what an encoder does not do says what to do.
  const Outcome continued = sherd({"generate", "--checkpoint", in("run"), "--prompt", "The"});
  EXPECT_EQ(continued.code, 2);
  EXPECT_THAT(continued.err, HasSubstr("--embed"));
  write_text(folder_ / "task.jsonl", R"({"text": "The 3 shards"})");
  const Outcome scored = sherd({"evaluate", "--checkpoint", in("run"), "--tasks", in("task.jsonl")});
  EXPECT_EQ(scored.code, 2);
  EXPECT_THAT(scored.err, HasSubstr("loss of masked tokens"));
  const Outcome lengthy = sherd({"generate", "--checkpoint", in("run"), "--embed", "--prompt",
                                 "The 3 shards of jar 5 lie in row 2, and the others somewhere else again."});
  EXPECT_EQ(lengthy.code, 1);
  EXPECT_THAT(lengthy.err, HasSubstr("and the model takes 16"));
}

/// Lines of JSON whose label a word tells, or of pairs whether both texts have the same word.
std::string labelled_lines(int count, bool pairs, int first) {
  const char* const words[] = {"jar", "row", "lie", "shards"};
  std::string out;
  for (int i = first; i < first + count; ++i) {
    const std::string word = words[i * 7 % 4], other = words[i * 5 / 3 % 4];
    const bool second = pairs ? word == other : i * 7 % 4 > 1;
    out += cat(R"({"text": "The )", i % 5, " ", word, " in )", i % 3, '"',
               pairs ? cat(R"(, "text_pair": "of )", other, '"') : "", R"(, "label": )",
               i % 2 == 0 ? cat(second ? 1 : 0)
               : second   ? R"("second")"
                          : R"("first")",
               "}\n");
  }
  return out;
}

void Encoder::prepare_labelled() const {
  write_text(folder_ / "labelled.jsonl", labelled_lines(100, true, 0));
  const Outcome prepared =
      sherd({"prepare", "--input", in("labelled.jsonl"), "--labels", "first,second", "--tokenizer",
             "hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json", "--output", in("labelled")});
  ASSERT_EQ(prepared.code, 0) << prepared.err;
}

TEST_F(Encoder, LearnsLabelsOfTextsAndOfPairs) {
  for (const bool pairs : {false, true}) {
    for (const char* name : {"train", "test"}) {
      write_text(folder_ / cat(name, ".jsonl"),
                 labelled_lines(name[1] == 'r' ? 400 : 80, pairs, name[1] == 'r' ? 0 : 401));
      const Outcome prepared =
          sherd({"prepare", "--input", in(cat(name, ".jsonl")), "--labels", "first,second", "--tokenizer",
                 "hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json", "--output", in(name)});
      ASSERT_EQ(prepared.code, 0) << prepared.err;
    }
    const std::vector<std::string> classifies{"--set", "model.head=sequence_classification",
                                              "--set", R"(model.labels=["first", "second"])",
                                              "--set", "data.path=" + in("train")};
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), classifies.begin(), classifies.end());
      return more;
    };
    std::filesystem::remove_all(folder_ / "run");
    const Outcome trained =
        train_bert(with({"--steps", pairs ? "400" : "100", "--set", "train_batch_size=16", "--ranks", "2"}));
    ASSERT_EQ(trained.code, 0) << trained.err;
    const Outcome judged = sherd({"evaluate", "--checkpoint", in("run"), "--data", in("test"), "--json"});
    ASSERT_EQ(judged.code, 0) << judged.err;
    const nlohmann::json report = nlohmann::json::parse(judged.out);
    EXPECT_EQ(report.at("texts"), 80);
    EXPECT_GT(report.at("accuracy").get<double>(), 0.9) << judged.out;
    EXPECT_GT(report.at("macro_f1").get<double>(), 0.9) << judged.out;
    // The lines of a dataset are prompts, too, and find the same labels.
    const Outcome found =
        sherd({"generate", "--checkpoint", in("run"), "--classify", "--prompts", in("test.jsonl")});
    ASSERT_EQ(found.code, 0) << found.err;
    std::istringstream lines(found.out), wanted(read_text(folder_ / "test.jsonl"));
    int right = 0, all = 0;
    for (std::string line, want; std::getline(lines, line) && std::getline(wanted, want); ++all) {
      const nlohmann::json label = nlohmann::json::parse(want).at("label");
      const bool second = label == "second" || label == 1;
      right += nlohmann::json::parse(line).at("label") == (second ? "second" : "first");
    }
    EXPECT_EQ(all, 80);
    EXPECT_EQ(right, std::lround(80 * report.at("accuracy").get<double>()));
  }
  write_text(folder_ / "other.jsonl", R"({"text": "The jar", "label": "no"})"
                                      "\n"
                                      R"({"text": "A row", "label": 1})"
                                      "\n"
                                      R"({"text": "lie in", "label": "yes"})"
                                      "\n");
  // Out and in; another model's weights, whose head begins anew.
  const Outcome exported = sherd({"export", in("run"), "--output", in("hf"), "--dtype", "fp32"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  const std::string config = read_text(folder_ / "hf" / "config.json");
  EXPECT_THAT(config, HasSubstr("\"BertForSequenceClassification\""));
  EXPECT_THAT(config, HasSubstr("\"1\": \"second\""));
  const Outcome imported = sherd({"import", in("hf"), "--output", in("imported"), "--dtype", "bf16"});
  ASSERT_EQ(imported.code, 0) << imported.err;
  write_text(folder_ / "texts.txt", "The 1 jar in 2\nThe 1 shards in 2\n");
  const auto classified = [&](const char* run) {
    const Outcome out =
        sherd({"generate", "--checkpoint", in(run), "--classify", "--prompts", in("texts.txt")});
    EXPECT_EQ(out.code, 0) << out.err;
    return out.out;
  };
  EXPECT_THAT(classified("run"), HasSubstr("\"probabilities\":{\"first\":"));
  EXPECT_EQ(classified("imported"), classified("run"));
  const auto begin_from = [&](const char* folder, const char* labels) {
    return train_bert({"--set", "model.head=sequence_classification", "--set", cat("model.labels=", labels),
                       "--set", "data.path=" + in("train"), "--set", "training.init_from=" + in(folder),
                       "--set", "training.save_dir=", "--steps", "1"});
  };
  const Outcome same = begin_from("hf", R"(["first", "second"])");
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_EQ(same.err.find("begins anew"), std::string::npos);
  for (const char* folder : {"hf", "run"}) {  // the data's labels are not the weights'
    const Outcome prepared =
        sherd({"prepare", "--input", in("other.jsonl"), "--labels", "no,yes", "--tokenizer",
               "hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json", "--output", in("train")});
    ASSERT_EQ(prepared.code, 0) << prepared.err;
    const Outcome other = begin_from(folder, R"(["no", "yes"])");
    EXPECT_EQ(other.code, 0) << other.err;
    EXPECT_THAT(other.err, HasSubstr("head is not among them, and begins anew"));
  }
  std::filesystem::remove_all(folder_ / "run");
  ASSERT_EQ(train_bert().code, 0);
  const Outcome begun = begin_from("run", R"(["no", "yes"])");
  EXPECT_EQ(begun.code, 0);
  EXPECT_THAT(begun.err, HasSubstr("head_dense is not among them, and begins anew"));
}

std::vector<double> as_numbers(const std::vector<std::string>& metrics) {
  std::vector<double> out;
  for (const std::string& each : metrics) out.push_back(std::stod(each));
  return out;
}

/// Also on stages between the first and the last, which read neither tokens nor labels.
TEST_F(Encoder, TextsStayApartOnAllStages) {
  prepare_labelled();
  const std::vector<std::vector<std::string>> kinds{
      {"--set", "data.packing=documents"},
      {"--set", "data.path=" + in("labelled"), "--set", "model.head=sequence_classification", "--set",
       R"(model.labels=["first", "second"])"},
      {"--set", "model.head=pretraining"}};
  for (const std::vector<std::string>& kind : kinds) {
    std::vector<double> losses[2];
    for (const int stages : {1, 3}) {
      std::vector<std::string> line{"--metrics", in("losses.jsonl"),
                                    "--ranks",   std::to_string(stages),
                                    "--set",     cat("parallel.pipeline=", stages),
                                    "--set",     "model.num_layers=4",
                                    "--set",     "bf16.enabled=false",
                                    "--set",     "gradient_accumulation_steps=3",
                                    "--set",     "train_batch_size=6"};
      line.insert(line.end(), kind.begin(), kind.end());
      const Outcome trained = train_bert(line);
      ASSERT_EQ(trained.code, 0) << trained.err;
      losses[stages / 3] = as_numbers(metric("losses.jsonl", "loss"));
      std::filesystem::remove_all(folder_ / "run");
    }
    ASSERT_EQ(losses[0].size(), losses[1].size());
    for (std::size_t i = 0; i < losses[0].size(); ++i)
      EXPECT_NEAR(losses[0][i], losses[1][i], 2e-5) << kind.back() << ", step " << i;
  }
}

/// Pairs of texts, on any number of ranks; what they leave to a classifier and to masked tokens alone.
TEST_F(Encoder, PairsTextsOnAnyNumberOfRanks) {
  prepare_labelled();
  std::vector<std::string> found[2];
  for (const int ranks : {1, 2}) {
    const Outcome got = train_bert({"--ranks", std::to_string(ranks), "--metrics", in("pairs.jsonl"), "--set",
                                    "model.head=pretraining", "--set", "train_micro_batch_size_per_gpu=2",
                                    "--set", "training.save_dir=" + in(cat("run", ranks))});
    ASSERT_EQ(got.code, 0) << got.err;
    found[ranks - 1] = metric("pairs.jsonl", "loss");
  }
  ASSERT_EQ(found[0].size(), 6u);
  EXPECT_EQ(found[0], found[1]);
  EXPECT_NEAR(std::stod(found[0][0]), std::log(900.0) + std::log(2.0), 0.3) << "both losses";
  const Outcome exported = sherd({"export", in("run1"), "--output", in("hf"), "--dtype", "fp32"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(read_text(folder_ / "hf" / "config.json"), HasSubstr("\"BertForPreTraining\""));
  for (const std::string from : {"run1", "hf"}) {
    SCOPED_TRACE(from);
    const auto begin = [&](std::vector<std::string> more) {
      more.insert(more.end(),
                  {"--set", "training.init_from=" + in(from), "--set", "training.save_dir=", "--steps", "1"});
      const Outcome out = train_bert(more);
      EXPECT_EQ(out.code, 0) << out.err;
      return out.err;
    };
    EXPECT_EQ(begin({"--set", "model.head=pretraining"}).find("anew"), std::string::npos);
    EXPECT_EQ(begin({"--set", "model.head=mlm"}).find("anew"), std::string::npos);
    const std::string classifier =
        begin({"--set", "model.head=sequence_classification", "--set", R"(model.labels=["first", "second"])",
               "--set", "data.path=" + in("labelled"), "--metrics", in(cat(from, ".jsonl"))});
    EXPECT_THAT(classifier, HasSubstr("head is not among"));
    EXPECT_EQ(classifier.find("head_dense"), std::string::npos) << "the pooler is there";
    EXPECT_EQ(begin({"--set", "model.head=mlm", "--set", "training.adapter.type=lora"}).find("anew"),
              std::string::npos);
  }
  // From a checkpoint and from files.
  EXPECT_NEAR(as_numbers(metric("run1.jsonl", "loss")).at(0), as_numbers(metric("hf.jsonl", "loss")).at(0),
              1e-3);
  const Outcome adapted =
      train_bert({"--set", "model.head=pretraining", "--set", "training.adapter.type=lora", "--set",
                  "training.init_from=" + in("hf")});
  EXPECT_EQ(adapted.code, 2);
  EXPECT_THAT(adapted.err, HasSubstr("would leave the layers that score pairs"));
  ASSERT_EQ(train_bert().code, 0);
  const Outcome from_masked =
      train_bert({"--set", "model.head=pretraining", "--set", "training.init_from=" + in("run"), "--set",
                  "training.save_dir=", "--steps", "1"});
  EXPECT_EQ(from_masked.code, 0) << from_masked.err;
  EXPECT_THAT(from_masked.err, HasSubstr("sentence_head"));
  const Outcome documents =
      train_bert({"--set", "model.head=pretraining", "--set", "data.packing=documents"});
  EXPECT_EQ(documents.code, 2);
  EXPECT_THAT(documents.err, HasSubstr("a pair of texts"));
  const Outcome no_types = train_bert({"--set", "model.head=pretraining", "--set", "model.token_types=1"});
  EXPECT_EQ(no_types.code, 2);
  EXPECT_THAT(no_types.err, HasSubstr("token_types 2"));
}

TEST_F(Encoder, NamesWhatLabelsDoNotFit) {
  write_text(folder_ / "l.jsonl", labelled_lines(4, false, 0));
  const auto prepare = [&](const std::string& labels, const std::string& input,
                           std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"prepare", "--input", in(input), "--labels", labels, "--tokenizer", "byte",
                               "--output", in("l")});
    return sherd(more).err;
  };
  EXPECT_THAT(prepare("first", "l.jsonl"), HasSubstr("names one class"));
  EXPECT_THAT(prepare("first,first", "l.jsonl"), HasSubstr("one twice"));
  EXPECT_THAT(prepare("first,third", "l.jsonl"),
              HasSubstr("line 2, has the label \"second\", which is none of"));
  EXPECT_THAT(prepare("first,second", "text.txt"), HasSubstr("is text, which has no labels"));
  EXPECT_THAT(prepare("first,second", "l.jsonl", {"--label-field", "class"}), HasSubstr("has no 'class'"));
  EXPECT_EQ(prepare("first,second", "l.jsonl").find("error"), std::string::npos);
  const auto trained = [&](std::vector<std::string> sets) {
    std::vector<std::string> more;
    for (const std::string& set : sets) more.insert(more.end(), {"--set", set});
    return train_bert(more).err;
  };
  EXPECT_THAT(trained({"model.head=sequence_classification", R"(model.labels=["first", "second"])"}),
              HasSubstr("have no labels: prepare them"));
  EXPECT_THAT(sherd(train({"--set", "data.path=" + in("l")})).err, HasSubstr("have the labels first,second"));
  EXPECT_THAT(sherd(train({"--set", "model.head=sequence_classification"})).err,
              HasSubstr("is for encoders"));
  const std::vector<std::string> labels{"model.head=sequence_classification",
                                        R"(model.labels=["first", "second"])"};
  const auto with_labels = [&](const std::string& set) { return trained({labels[0], labels[1], set}); };
  EXPECT_THAT(with_labels("training.adapter.type=lora"), HasSubstr("train a classifier whole"));
  EXPECT_THAT(with_labels("parallel.context=2"), HasSubstr("are kept apart on ranks that have whole ones"));
}

TEST_F(Encoder, NeedsATokenForMasks) {
  const Outcome without = sherd(train({"--set", "model.type=bert"}));
  EXPECT_EQ(without.code, 2);
  EXPECT_THAT(without.err, HasSubstr("has no token [MASK] or <mask>"));
}

}  // namespace
}  // namespace sherd::cli
