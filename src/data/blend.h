#pragma once

#include <memory>
#include <vector>

#include "data/packing/samples.h"

namespace sherd::data {

/// Samples of several sources by weight. Position p takes the source whose count so far is furthest behind
/// its weight's share, as Megatron Core's blending does (build_blending_indices), and that source's next
/// sample (or the two rows of its next pair); the first `cycle` choices are repeated, so that a position is
/// found without those before it. Each source keeps an order and epochs of its own.
class BlendedSamples final : public Samples {
 public:
  static constexpr std::int64_t cycle = std::int64_t{1} << 16;

  /// Weights above 0, of any sum, one per source. Throws Error{config} for a weight so small that `cycle`
  /// samples hold none of its source, Error{usage} for sources of different sequence lengths.
  BlendedSamples(std::vector<std::shared_ptr<const Samples>> sources, std::vector<double> weights);

  std::int64_t seq_length() const override { return sources_.front()->seq_length(); }
  std::int64_t tokens() const override;
  std::int64_t tokens_before(std::int64_t position) const override;
  /// The sum over all sources.
  std::int64_t samples_per_round() const override;
  RowTraits traits() const override { return sources_.front()->traits(); }
  void load(std::int64_t position, SampleRow& row) const override;
  void load_mismatched(std::int64_t position, SampleRow& row) const override;
  void will_need(std::int64_t position) const override;

  /// A source, and which of its samples.
  struct SourcePosition {
    std::size_t source = 0;
    std::int64_t position = 0;
    bool operator==(const SourcePosition&) const = default;
  };
  SourcePosition place(std::int64_t position) const;

 private:
  std::vector<std::shared_ptr<const Samples>> sources_;
  std::int64_t together_ = 1;            // samples that follow each other: the rows of a pair
  std::vector<std::uint16_t> choice_;    // the source of each position of a cycle
  std::vector<std::int32_t> earlier_;    // and how many before it in the cycle have the same
  std::vector<std::int64_t> per_cycle_;  // samples of each source in a cycle
};

}  // namespace sherd::data
