#pragma once

#include <filesystem>

#include "cli/train_fixture.h"

namespace sherd::cli {

namespace fs = std::filesystem;

class AdapterRuns : public Train {
 protected:
  /// A base, trained for 6 steps, in run/ and as published files in hf/: made once in a program, and copied.
  AdapterRuns() {
    static const TempFolder made;
    const bool is_first = fs::is_empty(made.path());
    if (is_first) {
      EXPECT_EQ(sherd(train({"--set", "model.dropout=0"})).code, 0);
      EXPECT_EQ(sherd({"export", in("run"), "--output", in("hf"), "--dtype", "fp32"}).code, 0);
    }
    const auto &from = is_first ? folder_ : made, &to = is_first ? made : folder_;
    for (const char* name : {"run", "hf"}) fs::copy(from / name, to / name, fs::copy_options::recursive);
  }
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  /// A run with an adapter of the base into folder `to`, with these settings.
  Outcome tune(const std::string& to, std::vector<std::string> sets,
               std::vector<std::string> more = {}) const {
    sets.insert(sets.begin(), {"model.dropout=0", "training.save_dir=" + in(to), "optimizer.params.lr=0.02"});
    std::vector<std::string> all{"--metrics", in("losses.jsonl")};
    for (const std::string& set : sets) all.insert(all.end(), {"--set", set});
    all.insert(all.end(), more.begin(), more.end());
    fs::remove(folder_ / "losses.jsonl");
    return sherd(train(all));
  }
  std::vector<std::string> losses() const { return metric("losses.jsonl", "loss"); }
  std::string from(const std::string& folder) const { return "training.init_from=" + in(folder); }
  Outcome said(const std::string& checkpoint, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"generate", "--checkpoint", in(checkpoint), "--prompt", "The ",
                               "--temperature", "1", "--max-tokens", "40"});
    return sherd(more);
  }
  const std::string lora_ = R"(training.adapter={"type": "lora", "rank": 4, "targets": "all-linear"})";
};

}  // namespace sherd::cli
