#include "base/text/check_json.h"

#include <cstddef>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "base/error.h"

namespace sherd {
namespace {

using nlohmann::json;

/// Follows the parser through the text and keeps no values.
class Watch : public nlohmann::json_sax<json> {
 public:
  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (!open_.back().keys.insert(name).second) fail(ErrorKind::data, "'", name, "' appears twice");
    open_.back().items = 0;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    fail(ErrorKind::data, error.what());
  }

 private:
  static constexpr std::size_t deepest = 16, longest = 4096;
  struct Level {
    std::unordered_set<std::string> keys;
    std::size_t items = 0;  ///< since the last key
  };

  bool value() {
    if (!open_.empty() && ++open_.back().items > longest)
      fail(ErrorKind::data, "a list has more than ", longest, " items");
    return true;
  }
  bool open() {
    value();
    if (open_.size() == deepest) fail(ErrorKind::data, "it is nested deeper than ", deepest, " levels");
    open_.emplace_back();
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::vector<Level> open_;
};

}  // namespace

void check_json(std::string_view text) {
  Watch watch;
  json::sax_parse(text, &watch);
}

}  // namespace sherd
