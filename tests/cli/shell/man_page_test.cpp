#include "cli/shell/shell_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <regex>
#include <set>
#include <sstream>

#include "base/error.h"
#include "cli/shell/declared.h"
#include "support/temp_folder.h"

namespace sherd::cli {
namespace {

using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::HasSubstr;
using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;

std::string printed_by(const Arguments& arguments, int code = 0) {
  CaptureStdout();
  CaptureStderr();
  EXPECT_EQ(run_program(arguments), code);
  const std::string out = GetCapturedStdout(), err = GetCapturedStderr();
  return code == 0 ? out : err;
}

Arguments words_in(const std::string& text) {
  Arguments out;
  std::istringstream words(text);
  for (std::string word; words >> word;) out.push_back(word);
  return out;
}

bool installed(const char* program) {
  return std::system(cat("command -v ", program, " >/dev/null 2>&1").c_str()) == 0;
}

/// The options that the help lists, read from its text.
std::set<std::string> options_in(const std::string& help) {
  std::set<std::string> out;
  const std::regex option(R"((?:^|\n) +(?:-h, )?--([a-z0-9-]+))");
  for (std::sregex_iterator at(help.begin(), help.end(), option), end; at != end; ++at) out.insert((*at)[1]);
  return out;
}

TEST(ManPage, HasEveryOptionOfTheHelp) {
  const std::map<std::string, std::string> pages = man_pages();
  std::size_t commands = 1;
  for (const Declared& each : declared_commands()) {
    Arguments arguments = words_in(each.path()), page{"man"};
    page.insert(page.end(), arguments.begin(), arguments.end());
    const std::string text = printed_by(page);
    ++commands;
    EXPECT_THAT(text, HasSubstr(cat("\\fBsherd ", each.path(), "\\fR\n")));
    EXPECT_THAT(pages.at("sherd.1"), HasSubstr(cat(".TP\n\\fB", arguments[0], "\\fR\n")));
    if (each.is_group()) continue;
    arguments.emplace_back("--help");
    const std::set<std::string> options = options_in(printed_by(arguments));
    EXPECT_GE(options.size(), 2u) << each.path();
    for (const std::string& option : options)
      EXPECT_THAT(text, HasSubstr("\\fB\\-\\-" + std::regex_replace(option, std::regex("-"), "\\-") + "\\fR"))
          << each.path();
    EXPECT_EQ(options.size(), each.line.options().size()) << each.path();
  }
  EXPECT_EQ(pages.size(), commands);
}

TEST(ManPage, IsCleanRoff) {
  TempFolder folder;
  printed_by({"man", "--output", (folder / "pages").string()});
  const auto lint = [&](const std::string& command) {
    const int status =
        std::system(cat("cd ", (folder / "pages").string(), " && ", command, " >../out 2>../err").c_str());
    EXPECT_EQ(status, 0) << command;
    return read_text(folder / "out") + read_text(folder / "err");
  };
  for (const auto& [name, page] : man_pages()) {
    EXPECT_EQ(read_text(folder / "pages" / name), page);
    for (const char c : page)
      ASSERT_LT(static_cast<unsigned char>(c), 0x80) << name << " has more than ASCII";
  }
  if (installed("groff")) EXPECT_EQ(lint("groff -man -ww -z -Tutf8 *.1"), "");
  if (installed("man")) EXPECT_EQ(lint("for p in *.1; do man --warnings -l $p 2>&1 >/dev/null; done"), "");
  if (installed("mandoc")) EXPECT_EQ(lint("mandoc -T lint -W error *.1"), "");
}

TEST(ManPage, TextStaysAsItIs) {
  if (!installed("groff")) GTEST_SKIP() << "groff is not installed";
  TempFolder folder;
  write_text(folder / "page", printed_by({"man", "train"}));
  ASSERT_EQ(std::system(cat("groff -man -Tutf8 -P-c ", (folder / "page").string(), " | sed 's/.\\x08//g' >",
                            (folder / "out").string())
                            .c_str()),
            0);
  const std::string text = read_text(folder / "out");
  EXPECT_THAT(text, HasSubstr("sherd-train - train the model that a configuration describes"));
  EXPECT_THAT(text, HasSubstr("--metrics-textfile F.prom"));
  EXPECT_THAT(text, HasSubstr("node_exporter's"));
}

TEST(ManPage, WhatIsNotThereIsSaid) {
  EXPECT_THAT(printed_by({"man", "trian"}, 2), HasSubstr("did you mean 'sherd-train'?"));
  EXPECT_THAT(printed_by({"man", "train", "--output", "x"}, 2), HasSubstr("name no command"));
  EXPECT_THAT(printed_by({"completion", "csh"}, 2), HasSubstr("bash, zsh or fish"));
  EXPECT_THAT(printed_by({"completion"}, 2), HasSubstr("bash, zsh or fish"));
}

}  // namespace
}  // namespace sherd::cli
