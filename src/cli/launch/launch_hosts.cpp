#include "cli/launch/launch_hosts.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"

namespace sherd::cli {
namespace {

/// Whether all of a text is a number of at least `least`.
bool is_number(std::string_view text, int least, int& number) {
  const auto [past, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && past == text.data() + text.size() && number >= least;
}

/// "4", or "+0+1+3"; none where it is neither.
std::vector<int> parse_slots(std::string_view text) {
  int number = 0;
  if (is_number(text, 1, number)) return host_with("", number).slots;
  std::vector<int> out;
  while (text.starts_with('+')) {
    const std::string_view word = text.substr(1, text.find('+', 1) - 1);
    if (!is_number(word, 0, number)) return {};
    out.push_back(number);
    text.remove_prefix(1 + word.size());
  }
  return text.empty() ? out : std::vector<int>();
}

}  // namespace

bool LaunchHost::is_whole() const {
  for (int i = 0; i < ranks(); ++i)
    if (slots[static_cast<std::size_t>(i)] != i) return false;
  return true;
}

LaunchHost host_with(std::string name, int count) {
  LaunchHost out{std::move(name), std::vector<int>(static_cast<std::size_t>(count))};
  std::iota(out.slots.begin(), out.slots.end(), 0);
  return out;
}

int ranks_on(const std::vector<LaunchHost>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const LaunchHost& host) { return sum + host.ranks(); });
}

std::vector<LaunchHost> read_hosts(const std::string& path) {
  std::ifstream in(path);
  if (!in) fail(ErrorKind::io, "cannot read the hosts' file ", excerpt(path, 300));
  std::vector<LaunchHost> out;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    std::istringstream words(line.substr(0, line.find('#')));
    std::string name;
    if (!(words >> name)) continue;
    int ranks = 1;
    for (std::string word; words >> word;) {
      constexpr std::string_view slots = "slots=";
      if (!word.starts_with(slots) || !is_number(std::string_view(word).substr(slots.size()), 1, ranks))
        fail(ErrorKind::config, path, ":", number, ": '", excerpt(word),
             "' is not understood: a line is a host and slots=N, its ranks");
    }
    const auto same = [&](const LaunchHost& other) { return other.name == name; };
    if (std::any_of(out.begin(), out.end(), same))
      fail(ErrorKind::config, path, ":", number, ": ", name,
           " stands there twice: give all its slots in one line");
    out.push_back(host_with(name, ranks));
  }
  if (out.empty()) fail(ErrorKind::config, path, " names no host");
  return out;
}

std::vector<LaunchHost> parse_hosts(const std::string& text) {
  std::vector<LaunchHost> out;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    const std::size_t at = word.find('=');
    LaunchHost host{word.substr(0, at), {}};
    if (at != std::string::npos) host.slots = parse_slots(std::string_view(word).substr(at + 1));
    if (host.name.empty() || host.slots.empty())
      throw UsageError(cat("--host-list takes HOST=RANKS,…, not '", excerpt(word), "'"));
    out.push_back(std::move(host));
  }
  return out;
}

std::string host_list(const std::vector<LaunchHost>& hosts) {
  std::string out;
  for (const LaunchHost& host : hosts) {
    out += cat(out.empty() ? "" : ",", host.name, '=');
    if (host.is_whole()) out += cat(host.ranks());
    for (std::size_t i = 0; !host.is_whole() && i < host.slots.size(); ++i) out += cat('+', host.slots[i]);
  }
  return out;
}

namespace {

std::string own_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

bool is_here(const std::string& host) {
  const std::string own = own_name();
  return host == "localhost" || host == "127.0.0.1" || host == own || host == own.substr(0, own.find('.'));
}

}  // namespace sherd::cli
