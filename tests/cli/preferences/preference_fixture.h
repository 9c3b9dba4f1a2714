#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "cli/train_fixture.h"

namespace sherd::cli {

namespace fs = std::filesystem;

/// Small models that learn from made-up pairs of answers, or from answers that are judged by themselves.
class PreferenceRuns : public Train {
 protected:
  using Json = nlohmann::json;
  using Words = std::vector<std::string>;

  /// The data are made once in a program, and copied.
  PreferenceRuns() {
    write_config();
    static const TempFolder made;
    if (fs::is_empty(made.path())) {
      std::string pairs, judged;
      for (int i = 0; i < 40; ++i) pairs += pair(i).dump() + "\n", judged += judged_answer(i).dump() + "\n";
      prepare("pairs", pairs), prepare("judged", judged);
      copy_data(folder_.path(), made.path());
    } else {
      copy_data(made.path(), folder_.path());
    }
  }
  static void copy_data(const fs::path& from, const fs::path& to) {
    for (const auto& entry : fs::directory_iterator(from)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("pairs.") || name.starts_with("judged.")) fs::copy(entry.path(), to / name);
    }
  }
  void write_config() const {
    write_text(folder_ / "p.json", cat(R"({
  "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
  "data_types": {"grad_accum_dtype": "fp32"},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
  "zero_optimization": {"stage": 2},
  "model": {"type": "llama", "seq_length": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 2},
  "data": {"path": ")",
                                       in("pairs"), R"(", "packing": "documents", "split": [0.9, 0.1]},
  "training": {"objective": "dpo", "steps": 3, "eval_interval": 2, "log_interval": 0},
  "parallel": {"timeout_seconds": 60}
})"));
  }

  std::string in(const std::string& name) const { return (folder_ / name).string(); }

  /// Two answers of many lengths to a question.
  static Json pair(int i) {
    static const char* const looks[] = {"red", "blue", "green", "tall"};
    static const char* const things[] = {"cat", "dog", "moon", "boat", "tree"};
    const std::string thing = things[i * 3 % 5];
    std::string chosen = cat(" A ", looks[i * 7 % 4], ' ', thing), rejected = " No " + thing;
    chosen.append(static_cast<std::size_t>(i % 4), '!');
    for (int more = 0; more < i % 3; ++more) rejected += " at all";
    return {
        {"prompt", cat("Q", i % 9, ": what ", thing, "?")}, {"chosen", chosen}, {"rejected", rejected + "."}};
  }
  /// Three of four are good, so that the mismatched ones become likelier, too.
  static Json judged_answer(int i) {
    const bool good = i % 4 != 3;
    return {{"prompt", pair(i)["prompt"]},
            {"completion", pair(i)[good ? "chosen" : "rejected"]},
            {"label", good}};
  }
  void prepare(const std::string& name, const std::string& lines) const {
    write_text(folder_ / (name + ".jsonl"), lines);
    const Outcome got =
        sherd({"prepare", "--input", in(name + ".jsonl"), "--tokenizer", "byte", "--output", in(name)});
    require(got.code == 0, got.err);
  }

  static Words joined_words(Words first, const Words& more) {
    first.insert(first.end(), more.begin(), more.end());
    return first;
  }
  /// The arguments of `command` with the configuration of these runs and some keys of it.
  Words arguments(const std::string& command, const Words& sets, const Words& more = {}) const {
    Words out = joined_words({command, "--config", in("p.json")}, more);
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    return out;
  }
  Outcome learn(const Words& sets, int ranks = 1, const Words& more = {}) const {
    fs::remove(folder_ / "m.jsonl");
    return sherd(arguments(
        "train", sets, joined_words({"--ranks", std::to_string(ranks), "--metrics", in("m.jsonl")}, more)));
  }
  /// A run's metrics, line by line; the file of its reference stays from the run before.
  std::vector<Json> trained_on(const Words& sets, int ranks = 1, const Words& more = {}) {
    const Outcome got = learn(sets, ranks, more);
    EXPECT_EQ(got.code, 0) << got.err;
    said_ = got.err;
    std::vector<Json> out;
    std::ifstream file(folder_ / "m.jsonl");
    for (std::string line; std::getline(file, line);) out.push_back(Json::parse(line));
    require(!out.empty(), "the run told of no step: ", got.err);
    return out;
  }
  /// The metrics of a run that finds no such file beside the data.
  std::vector<Json> trained(const Words& sets, int ranks = 1, const Words& more = {}) {
    for (const char* name : {"pairs", "judged"}) fs::remove(reference_of(name));
    return trained_on(sets, ranks, more);
  }
  fs::path reference_of(const std::string& name) const { return folder_ / (name + ".reference"); }
  /// The log-probabilities in such a file.
  static std::vector<double> values_in(const fs::path& file) {
    const std::string all = read_text(file);
    const std::size_t begin = all.find('\n') + 1;
    std::vector<double> out((all.size() - begin) / sizeof(double));
    std::memcpy(out.data(), all.data() + begin, out.size() * sizeof(double));
    return out;
  }

  /// The part of lines that tells of training itself, and not of the machine.
  static std::vector<Json> course(const std::vector<Json>& lines) {
    std::vector<Json> out;
    for (const Json& line : lines) {
      Json& one = out.emplace_back();
      for (const char* key : {"step", "loss", "objective", "val_loss", "metrics", "grad_norm", "moe"})
        if (line.contains(key)) one[key] = line[key];
      // Means of routers' losses are to rounding.
      if (one.contains("moe")) one["moe"].erase("balance_loss"), one["moe"].erase("z_loss");
    }
    return out;
  }
  /// Every number of both courses differs by no more than this, of itself or of 1.
  static void expect_near(const std::vector<Json>& got, const std::vector<Json>& want, double tolerance) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const Json one = course({got[i]})[0].flatten(), other = course({want[i]})[0].flatten();
      ASSERT_EQ(one.size(), other.size()) << got[i] << "\n" << want[i];
      for (const auto& [name, value] : other.items()) {
        ASSERT_TRUE(one.contains(name)) << name;
        const double number = value.get<double>();
        EXPECT_NEAR(one[name].get<double>(), number, tolerance * std::max(1.0, std::abs(number)))
            << name << " of line " << i;
      }
    }
  }
  /// A policy that is its reference prefers neither answer.
  static void expect_begins_as_the_reference(const Json& line) {
    EXPECT_EQ(line["loss"].get<double>(), static_cast<double>(static_cast<float>(std::log(2.0))));
    for (const char* name : {"rewards/chosen", "rewards/rejected", "rewards/margins"})
      EXPECT_EQ(line["objective"][name].get<double>(), 0) << name;
  }

  const std::string lora_ = R"(training.adapter={"type": "lora", "rank": 4, "targets": "all-linear"})";
  std::string said_;  ///< on standard error, by the last of trained_on()
};

}  // namespace sherd::cli
