#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace sherd::engine {

/// The values that a reference found for the texts of a run, by their number (data::SampleRow::texts):
/// log-probabilities in nats, NaN for a text that no sample has; for kto also those of mismatched answers.
struct ReferenceValues {
  std::vector<double> texts, mismatched;
};

/// The texts and settings that log-probabilities were computed for; compared as text. These facts do not tell
/// which weights computed them: whoever uses the values compares a few with what the weights find.
struct ReferenceFacts {
  std::uint32_t fingerprint = 0;  ///< TokenData's
  std::int64_t texts = 0;
  std::int64_t seq_length = 0;
  bool packed = false, pairs = true;
  double ld_alpha = 1;
  std::array<double, 2> split{};  ///< which texts there are, and with which others' answers
  bool mismatched = false;
};

/// A file of such values: a line of JSON with the facts and the CRC-32C of what follows, then the values,
/// fp64, little-endian. Whole or absent.
class ReferenceFile {
 public:
  explicit ReferenceFile(std::filesystem::path path) : path_(std::move(path)) {}
  const std::filesystem::path& path() const { return path_; }

  /// Its bytes; empty where it is absent. Throws Error{io} for one that cannot be read.
  std::string bytes() const;
  /// Reads what bytes() gave. Throws Error{data} for one that is damaged. False: it is of other facts, which
  /// `why` tells.
  bool read(const std::string& bytes, const ReferenceFacts& facts, ReferenceValues& values,
            std::string& why) const;
  /// Throws Error{io}, also where its folder cannot be written.
  void require_writable() const;
  void write(const ReferenceFacts& facts, const ReferenceValues& values) const;
  /// That of the values: tells them apart.
  static std::uint32_t checksum(const ReferenceValues& values);

 private:
  std::filesystem::path path_;
};

}  // namespace sherd::engine
