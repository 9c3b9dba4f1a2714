#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/inference/inference.h"
#include "data/indexed_dataset.h"

namespace sherd::cli {

/// How often texts of each class were given each.
class ConfusionMatrix {
 public:
  explicit ConfusionMatrix(std::size_t classes) : classes_(classes), counts_(classes * classes, 0) {}
  void add(std::size_t is, std::size_t given) { ++counts_[is * classes_ + given]; }

  std::int64_t texts() const;
  std::int64_t texts_of(std::size_t label) const;  ///< that are of this class
  double accuracy() const;                         ///< the share that was given its own; 0 of none
  /// Of one class; 0 where nothing is of it, or was given it.
  double precision(std::size_t label) const;
  double recall(std::size_t label) const;
  double f1(std::size_t label) const;
  double macro_f1() const;  ///< the mean over the classes that texts have or were given

 private:
  std::int64_t count(std::size_t is, std::size_t given) const { return counts_[is * classes_ + given]; }
  std::int64_t given(std::size_t label) const;

  std::size_t classes_;
  std::vector<std::int64_t> counts_;
};

/// Classifies the documents of a dataset with labels, the first `limit` (0: all) of them, `batch` at a time,
/// and returns what a report of it says: a table, or an object of JSON. Throws Error{config} where the model
/// has other labels than the dataset.
std::string classification_report(const Inference& from, const data::IndexedDataset& dataset,
                                  std::size_t limit, std::int64_t batch, bool json);

}  // namespace sherd::cli
