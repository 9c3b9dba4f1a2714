// What shells complete: bash's script is run in bash; those of zsh and fish are read by their shells where
// these are installed.
#include "cli/shell/shell_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/error.h"
#include "cli/shell/declared.h"
#include "config/keys.h"
#include "support/temp_folder.h"

namespace sherd::cli {
namespace {

using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

bool installed(const std::string& program) {
  return std::system(cat("command -v ", program, " >/dev/null 2>&1").c_str()) == 0;
}

class Completion : public ::testing::Test {
 protected:
  int shell(const std::string& command) const {
    return std::system(cat("cd ", folder_.path().string(), " && ", command, " >out 2>err").c_str());
  }
  /// The words that bash offers for the last of `words`, which it cuts at = and : as it does on its command
  /// line.
  std::vector<std::string> replies(const std::vector<std::string>& words) const {
    std::string line = "source ./sherd.bash; COMP_WORDS=(";
    for (const std::string& word : words) line += cat(" '", word, "'");
    line += cat("); COMP_CWORD=", words.size() - 1, "; _sherd; printf '%s\\n' \"${COMPREPLY[@]}\"\n");
    write_text(folder_ / "sherd.bash", bash_completion());
    write_text(folder_ / "question", line);
    EXPECT_EQ(shell("bash --norc question"), 0);
    EXPECT_EQ(read_text(folder_ / "err"), "");
    std::vector<std::string> out;
    std::istringstream lines(read_text(folder_ / "out"));
    for (std::string reply; std::getline(lines, reply);)
      if (!reply.empty()) out.push_back(reply);
    return out;
  }

  TempFolder folder_;
};

TEST_F(Completion, KnowsCommandsAndTheirCommands) {
  EXPECT_THAT(replies({"sherd", "tra"}), ElementsAre("train"));
  std::vector<std::string> names{"--help", "--version"};
  for (const Command& command : all_commands()) names.emplace_back(command.name);
  EXPECT_THAT(replies({"sherd", ""}), ::testing::UnorderedElementsAreArray(names));
  EXPECT_THAT(replies({"sherd", "bench", ""}),
              UnorderedElementsAre("adam", "nvme", "comm", "gemm", "machine"));
  EXPECT_THAT(replies({"sherd", "checkpoint", ""}), UnorderedElementsAre("inspect", "verify", "convert"));
  EXPECT_THAT(replies({"sherd", "completion", ""}), UnorderedElementsAre("bash", "zsh", "fish"));
}

TEST_F(Completion, KnowsEveryOptionOfEveryCommand) {
  for (const Declared& each : declared_commands()) {
    if (each.is_group()) continue;
    std::vector<std::string> words{"sherd"}, options;
    std::istringstream path(each.path());
    for (std::string word; path >> word;) words.push_back(word);
    words.emplace_back("--");
    for (const Option& option : each.line.options()) options.push_back("--" + option.name);
    EXPECT_THAT(options, IsSupersetOf({"--help", "--quiet"})) << each.path();
    EXPECT_THAT(replies(words), ::testing::UnorderedElementsAreArray(options)) << each.path();
  }
  EXPECT_THAT(replies({"sherd", "train", "--resume", "--metrics-p"}), ElementsAre("--metrics-port"));
  EXPECT_THAT(replies({"sherd", "bench", "adam", "--pa"}), ElementsAre("--parameters"));
}

TEST_F(Completion, OffersFilesAndFoldersWhereTheseAreTaken) {
  write_text(folder_ / "a file.json", "");
  std::filesystem::create_directory(folder_ / "a folder");
  EXPECT_THAT(replies({"sherd", "train", "--config", "a"}), UnorderedElementsAre("a file.json", "a folder"));
  EXPECT_THAT(replies({"sherd", "train", "--config", "=", "a f"}),
              UnorderedElementsAre("a file.json", "a folder"));
  EXPECT_THAT(replies({"sherd", "train", "--config", "b.json", "a"}),
              UnorderedElementsAre("a file.json", "a folder"));
  EXPECT_THAT(replies({"sherd", "train", "a"}), UnorderedElementsAre("a file.json", "a folder"));
  EXPECT_THAT(replies({"sherd", "import", "a"}), ElementsAre("a folder"));
  EXPECT_THAT(replies({"sherd", "checkpoint", "verify", "a"}), ElementsAre("a folder"));
  EXPECT_THAT(replies({"sherd", "generate", "--nvme-path", "a"}), ElementsAre("a folder"));
  EXPECT_THAT(replies({"sherd", "train", "--steps", "a"}), IsEmpty());
  EXPECT_THAT(replies({"sherd", "train", "--steps", ""}), IsEmpty());
}

TEST_F(Completion, OffersChoicesWhereTheHelpListsThem) {
  EXPECT_THAT(replies({"sherd", "import", "--dtype", ""}), UnorderedElementsAre("bf16", "fp16", "fp32"));
  EXPECT_THAT(replies({"sherd", "import", "--dtype", "=", "b"}), ElementsAre("bf16"));
  EXPECT_THAT(replies({"sherd", "plan", "--goal", "t"}), UnorderedElementsAre("time", "tokens_per_day"));
  EXPECT_THAT(replies({"sherd", "prepare", "--tokenizer", "s"}), UnorderedElementsAre("spm:", "spm-train:"));
  write_text(folder_ / "mine.jinja", "");
  EXPECT_THAT(replies({"sherd", "generate", "--chat-template", "mi"}),
              UnorderedElementsAre("mistral", "mine.jinja"));
}

TEST(Expected, GoesByHowTheHelpShowsAValue) {
  using Kind = Expected::Kind;
  for (const char* file : {"FILE", "F", "F.jsonl", "METRICS.jsonl", "PREFIX", "RUN|METRICS.jsonl"})
    EXPECT_EQ(expected_of(file).kind, Kind::file) << file;
  for (const char* folder : {"D", "DIR", "HF_DIR", "CKPT", "RUN"})
    EXPECT_EQ(expected_of(folder).kind, Kind::folder) << folder;
  for (const char* text : {"N", "B,...", "TAG", "X", "5GB", "1.5"})
    EXPECT_EQ(expected_of(text).kind, Kind::text) << text;
  EXPECT_EQ(expected_of("").kind, Kind::nothing);
  EXPECT_THAT(expected_of("a|b:REST|c,...|FILE").words, ElementsAre("a", "b:", "c"));
  EXPECT_TRUE(expected_of("a|FILE").or_file);
  EXPECT_FALSE(expected_of("a|b").or_file);
  EXPECT_THAT(expected_of("model.K=V").words, ElementsAre("model."));
  EXPECT_THAT(expected_of("a.b.c=V").words, ElementsAre(""));
}

TEST_F(Completion, OffersKeysOfTheConfigurationAndTheirWords) {
  EXPECT_THAT(replies({"sherd", "train", "--set", "zero_optimization.st"}),
              Contains("zero_optimization.stage="));
  EXPECT_THAT(replies({"sherd", "train", "--set", "fp16.enabled", "=", "t"}), ElementsAre("true"));
  EXPECT_THAT(replies({"sherd", "train", "--set", "fp16.enabled", "="}),
              UnorderedElementsAre("true", "false"));
  EXPECT_THAT(replies({"sherd", "train", "--set", "=", "fp16.enabled", "=", "f"}), ElementsAre("false"));
  EXPECT_THAT(replies({"sherd", "train", "--set", "optimizer.type", "=", "Adam"}),
              UnorderedElementsAre("Adam", "AdamW", "AdamW8bit"));
  EXPECT_THAT(replies({"sherd", "train", "--set", "optimizer.params.l"}),
              IsSupersetOf({"optimizer.params.lr=", "optimizer.params.lr_decay="}));
  EXPECT_THAT(replies({"sherd", "import", "--set", ""}), ::testing::Each(StartsWith("model.")));
  EXPECT_THAT(replies({"sherd", "generate", "--set", ""}), ::testing::Each(StartsWith("parallel.")));
  const std::vector<SettableKey> keys = settable_keys();
  EXPECT_EQ(replies({"sherd", "train", "--set", ""}).size(), keys.size());
  for (const config::KeyInfo& key : config::known_keys())
    if (key.effect == config::Effect::effective && key.path.find('[') == std::string::npos) {
      EXPECT_TRUE(std::any_of(keys.begin(), keys.end(), [&](const auto& k) { return k.path == key.path; }))
          << key.path;
    }
}

TEST_F(Completion, LeavesAProgramBehindTheDashesToTheShell) {
  EXPECT_THAT(replies({"sherd", "launch", "--ranks", "2", "--", "train", "--"}), IsEmpty());
}

TEST_F(Completion, ScriptsAreReadByTheirShells) {
  struct Script {
    const char *shell, *check;
    std::string text;
  };
  for (const Script& script : {Script{"bash", "bash -n", bash_completion()},
                               {"zsh", "zsh -n", zsh_completion()},
                               {"fish", "fish --no-execute", fish_completion()}}) {
    write_text(folder_ / "script", script.text);
    for (const Declared& each : declared_commands())
      for (const Option& option : each.line.options())
        if (!each.is_group() && std::string(script.shell) == "zsh") {
          EXPECT_THAT(script.text, HasSubstr(cat("--", option.name, option.shown.empty() ? "[" : "=[")));
        }
    if (!installed(script.shell)) continue;
    EXPECT_EQ(shell(cat(script.check, " script")), 0) << script.shell << read_text(folder_ / "err");
    EXPECT_EQ(read_text(folder_ / "err"), "") << script.shell;
  }
}

TEST_F(Completion, FishOffersTheSame) {
  if (!installed("fish")) GTEST_SKIP() << "fish is not installed";
  write_text(folder_ / "sherd.fish", fish_completion());
  const auto offers = [&](const std::string& line) {
    EXPECT_EQ(shell(cat("HOME=$PWD fish --no-config -c 'source sherd.fish; complete -C \"", line, "\"'")), 0)
        << read_text(folder_ / "err");
    return read_text(folder_ / "out");
  };
  EXPECT_THAT(offers("sherd tra"), StartsWith("train\t"));
  EXPECT_THAT(offers("sherd bench "), HasSubstr("gemm\t"));
  EXPECT_THAT(offers("sherd bench gemm --to"), StartsWith("--tokens\t"));
  EXPECT_THAT(offers("sherd import --dtype b"), StartsWith("bf16"));
  EXPECT_THAT(offers("sherd checkpoint "), HasSubstr("inspect"));
  EXPECT_THAT(offers("sherd train --set fp16.enabled=t"), StartsWith("fp16.enabled=true"));
  EXPECT_THAT(offers("sherd import --set zero"), Not(HasSubstr("zero_optimization.stage")));
}

}  // namespace
}  // namespace sherd::cli
