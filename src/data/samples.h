#pragma once

#include <cstdint>
#include <vector>

namespace sherd::data {

/// What stands in labels for a token that is no target of the loss (PyTorch's ignore_index).
inline constexpr std::int32_t no_label = -100;

/// A sample as a model takes it.
struct Row {
  std::vector<std::int32_t> tokens,
      labels;  ///< seq_length each; labels[i]: the token after tokens[i], or no_label
  /// Where documents end that do not see each other, the last one at seq_length; empty: the row is one text.
  std::vector<std::int32_t> ends;
};

/// An endless sequence of samples. What lies at a position is a pure function of the data, the settings and
/// the position. Safe to share between ranks and threads.
class Samples {
 public:
  virtual ~Samples() = default;

  virtual std::int64_t seq_length() const = 0;
  /// Tokens that one pass over the data has.
  virtual std::int64_t tokens() const = 0;
  /// Samples that make one pass, or as many passes as are shuffled together.
  virtual std::int64_t samples_per_round() const = 0;
  /// Rows have ends.
  virtual bool keeps_documents_apart() const = 0;

  /// Writes the sample at `position` ≥ 0. Throws Error{data} naming file, token, id for an id outside the
  /// vocabulary.
  virtual void load(std::int64_t position, Row& row) const = 0;
  /// Asks the kernel to read that sample ahead.
  virtual void will_need(std::int64_t position) const = 0;
};

}  // namespace sherd::data
