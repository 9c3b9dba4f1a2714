#include "cli/prompts_file.h"

#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/excerpt.h"
#include "base/read_file.h"

namespace sherd::cli {
namespace {

std::string prompt_of(const std::string& line, const std::string& where) {
  const auto object = nlohmann::json::parse(line, nullptr, false);
  const auto found = object.is_object() ? object.find("prompt") : object.end();
  if (!object.is_object() || found == object.end() || !found->is_string())
    fail(ErrorKind::data, where, " is no JSON object with a text \"prompt\": '", excerpt(line), "'");
  return found->get<std::string>();
}

}  // namespace

std::vector<std::string> read_prompts(const std::filesystem::path& path) {
  std::istringstream lines(read_file(path));
  const bool json = path.extension() == ".jsonl";
  std::vector<std::string> out;
  std::string line;
  for (std::size_t number = 1; std::getline(lines, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    out.push_back(json ? prompt_of(line, cat(path.string(), ":", number)) : line);
  }
  if (out.empty()) fail(ErrorKind::data, path.string(), " holds no prompts: each is a line");
  return out;
}

CompletionsFile::CompletionsFile(const std::filesystem::path& path, const std::vector<std::string>& prompts)
    : path_(path), prompts_(prompts), stdout_(std::cout) {
  if (path_.empty()) return;
  file_.open(path_, std::ios::binary | std::ios::trunc);
  if (!file_) fail(ErrorKind::io, "cannot write ", path_.string(), ": is its folder there and writable?");
}

void CompletionsFile::add(std::size_t prompt, Completion completion) {
  waiting_.emplace(prompt, std::move(completion));
  for (auto at = waiting_.find(next_); at != waiting_.end(); at = waiting_.find(++next_)) {
    const nlohmann::ordered_json line{{"prompt", prompts_[next_]},
                                      {"completion", at->second.text},
                                      {"tokens", at->second.tokens},
                                      {"finish", at->second.finish}};
    out() << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n' << std::flush;
    if (!out())
      fail(ErrorKind::io, "writing ", path_.empty() ? "stdout" : path_.string(),
           " failed: is the disk full?");
    waiting_.erase(at);
  }
}

}  // namespace sherd::cli
