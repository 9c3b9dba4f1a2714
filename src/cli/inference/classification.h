#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/inference/entities.h"
#include "cli/inference/inference.h"
#include "data/indexed_dataset.h"

namespace sherd::cli {

/// How often texts, or tokens, of each class were given each.
class ConfusionMatrix {
 public:
  explicit ConfusionMatrix(std::size_t classes) : classes_(classes), counts_(classes * classes, 0) {}
  void add(std::size_t is, std::size_t given) { ++counts_[is * classes_ + given]; }

  std::int64_t counted() const;
  double accuracy() const;                  ///< the share that was given its own; 0 of none
  FoundCounts of(std::size_t label) const;  ///< of one class
  double macro_f1() const;                  ///< the mean over the classes that some are of, or were given

 private:
  std::int64_t count(std::size_t is, std::size_t given) const { return counts_[is * classes_ + given]; }

  std::size_t classes_;
  std::vector<std::int64_t> counts_;
};

/// Classifies the documents of a dataset with labels, or their tokens, the first `limit` (0: all) of them,
/// `batch` at a time, and returns what a report of it says: a table, or an object of JSON. Of tokens those
/// with a label count, and where labels are of entities there are figures of these, too. Throws Error{config}
/// where the model has other labels than the dataset, or has them of something else.
std::string classification_report(const Inference& from, const data::IndexedDataset& dataset,
                                  std::size_t limit, std::int64_t batch, bool json);

}  // namespace sherd::cli
