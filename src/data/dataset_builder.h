#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"
#include "data/indexed_dataset.h"

namespace sherd::data {

/// The contents of a finished dataset, in numbers.
struct DatasetCounts {
  std::int64_t tokens = 0, sequences = 0, documents = 0;
  std::int64_t masked = 0;  ///< tokens that are no targets of the loss
};

/// Makes the folder that files of this prefix will lie in. Throws Error{usage} unless `prefix` names a file,
/// Error{io} when the folder cannot be made.
void check_output_prefix(const std::string& prefix);

/// Writes PREFIX.bin and PREFIX.idx as a stream, and PREFIX.mask where some tokens are no targets: memory
/// does not grow with the dataset (the lengths wait in an unnamed file). Nothing appears under the final
/// names before finish(); dropped before that, it leaves no trace.
class DatasetBuilder {
 public:
  /// Chooses u16 or i32 tokens by the vocabulary. Throws Error{io} when the folder is missing or not
  /// writable.
  DatasetBuilder(const std::string& prefix, std::int64_t vocab_size);

  /// Appends one sequence to the current document; `last` ends the document with it. `learned`: a byte per
  /// token, 0 where it is no target of the loss; empty: all are. Throws Error{data} for an id outside the
  /// vocabulary.
  void add(std::span<const std::int32_t> tokens, bool last = true,
           std::span<const std::uint8_t> learned = {});

  const DatasetCounts& counts() const { return counts_; }

  /// Completes .bin and .mask, then `before_index()` (where the sidecar is written), then .idx, whose
  /// appearance makes the dataset valid; an older .idx is removed first. Throws Error{usage} when a document
  /// is still open.
  template <class Between>
  DatasetCounts finish(Between&& before_index) {
    finish_tokens();
    before_index();
    finish_index();
    return counts_;
  }
  DatasetCounts finish() {
    return finish([] {});
  }

 private:
  void finish_tokens();
  void finish_index();
  void add_mask(std::span<const std::uint8_t> learned);
  void put_mask(bool learned);
  void finish_mask();
  void flush_tokens();
  void flush_lengths();
  template <class Visit>
  void for_each_length(Visit&& visit);

  std::string prefix_;
  std::int64_t vocab_size_;
  TokenType type_;
  AtomicFile tokens_file_, index_file_;
  std::optional<AtomicFile> mask_file_;  // from the first token on that is no target
  std::vector<std::byte> token_buffer_, mask_buffer_;
  std::int64_t masked_ = 0;                  // tokens that the mask speaks of so far
  std::vector<std::int32_t> length_buffer_;  // a length n that ends its document is kept as ~n
  FileDescriptor lengths_file_;              // unnamed, beside the dataset
  bool document_open_ = false;
  DatasetCounts counts_;
};

}  // namespace sherd::data
