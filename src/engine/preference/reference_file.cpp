#include "engine/preference/reference_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"

namespace sherd::engine {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* format_name = "sherd reference log-probabilities";

Json json_of(const ReferenceFacts& facts) {
  return {{"dataset", facts.fingerprint},
          {"texts", facts.texts},
          {"model.seq_length", facts.seq_length},
          {"data.packing", facts.packed ? "documents" : "stream"},
          {"data.split", facts.split},
          {"pairs", facts.pairs},
          {"ld_alpha", facts.ld_alpha},
          {"other answers", facts.mismatched}};
}

std::string bytes_of(const std::vector<double>& values) {
  std::string out(values.size() * sizeof(double), '\0');
  if (!values.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

std::string payload(const ReferenceValues& values) {
  return bytes_of(values.texts) + bytes_of(values.mismatched);
}

}  // namespace

std::string ReferenceFile::bytes() const {
  std::error_code unknown;
  return std::filesystem::exists(path_, unknown) ? read_file(path_) : std::string();
}

void ReferenceFile::require_writable() const {
  const std::filesystem::path folder = path_.parent_path().empty() ? "." : path_.parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    fail(ErrorKind::io, "the reference's log-probabilities cannot be written to '", path_.string(), "' (",
         std::strerror(errno), "): name another file by training.preference.reference_file");
}

std::uint32_t ReferenceFile::checksum(const ReferenceValues& values) {
  const std::string bytes = payload(values);
  return crc32c(bytes.data(), bytes.size());
}

void ReferenceFile::write(const ReferenceFacts& facts, const ReferenceValues& values) const {
  const std::string bytes = payload(values);
  const Json head{{"format", format_name},
                  {"version", 1},
                  {"facts", json_of(facts)},
                  {"crc32c", crc32c(bytes.data(), bytes.size())}};
  write_file_atomically(path_, head.dump() + "\n" + bytes);
}

bool ReferenceFile::read(const std::string& all, const ReferenceFacts& facts, ReferenceValues& values,
                         std::string& why) const {
  const auto damaged = [&](const std::string& cause) {
    fail(ErrorKind::data, "'", path_.string(), "', the reference's log-probabilities, is damaged (", cause,
         "): remove it, and begin the run anew, or bring back a copy");
  };
  const std::size_t end = all.find('\n');
  const Json head = Json::parse(all.substr(0, std::min(end, all.size())), nullptr, false);
  if (end == std::string::npos || !head.is_object() || head.value("format", "") != format_name ||
      !head.contains("facts") || !head.contains("crc32c") || !head["crc32c"].is_number_unsigned())
    damaged("it does not begin as one");
  if (head.value("version", Json(0)) != 1) {
    why = "another version of the program wrote it";
    return false;
  }
  const Json expected = json_of(facts);
  if (head["facts"] != expected) {
    for (const auto& [key, value] : expected.items()) {
      const Json there = head["facts"].is_object() ? head["facts"].value(key, Json()) : Json();
      if (there == value) continue;
      why = cat(key, " is ", excerpt(there.dump()), " there, and ", excerpt(value.dump()), " here");
      break;
    }
    return false;
  }
  const std::string bytes = all.substr(end + 1);
  const auto texts = static_cast<std::size_t>(facts.texts);
  if (bytes.size() != texts * sizeof(double) * (facts.mismatched ? 2 : 1)) damaged("its length");
  if (crc32c(bytes.data(), bytes.size()) != head["crc32c"].get<std::uint32_t>()) damaged("its checksum");
  values.texts.resize(texts), values.mismatched.resize(facts.mismatched ? texts : 0);
  std::memcpy(values.texts.data(), bytes.data(), texts * sizeof(double));
  if (facts.mismatched)
    std::memcpy(values.mismatched.data(), bytes.data() + texts * sizeof(double), texts * sizeof(double));
  return true;
}

}  // namespace sherd::engine
