#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace sherd::cli {

/// Counts of labels or entities: those that were given rightly, all that are there, and all that were given;
/// with precision, recall and F1, 0 where there is nothing to divide by.
struct FoundCounts {
  std::int64_t right = 0, there = 0, given = 0;
  double precision() const { return share(right, given); }
  double recall() const { return share(right, there); }
  double f1() const { return share(2 * right, there + given); }
  static double share(std::int64_t part, std::int64_t of) {
    return of == 0 ? 0 : static_cast<double>(part) / static_cast<double>(of);
  }
};

/// Words [begin, end) of a text that are of a type together.
struct Entity {
  std::string type;
  std::size_t begin = 0, end = 0;
  auto operator<=>(const Entity&) const = default;
};

/// Whether labels are of entities: "O", "B-TYPE" where one begins and "I-TYPE" within, and no others.
bool are_of_entities(std::span<const std::string> labels);

/// The entities of a text by the labels of its words, as seqeval 1.2.2 finds them by default, also where an
/// I- follows nothing of its type: one begins at each B-, behind an O and where the type changes.
std::vector<Entity> entities_in(std::span<const std::string> labels);

/// How well entities are found: one counts as right where type and both ends are. As seqeval, without
/// `mode="strict"`.
class EntityScores {
 public:
  /// The labels of a text's words, as they are and as they were given.
  void add(std::span<const std::string> are, std::span<const std::string> given);
  const std::map<std::string, FoundCounts>& by_type() const { return by_type_; }
  FoundCounts all() const;  ///< of all types together (micro)

 private:
  std::map<std::string, FoundCounts> by_type_;
};

}  // namespace sherd::cli
