#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/report/step_record.h"

namespace sherd::cli {

/// Steps of a run from one of its checkpoints to the next.
struct Interval {
  std::int64_t begin = 0, end = 0;  ///< steps done at its ends
  std::filesystem::path from;       ///< the checkpoint where it begins; empty: the run's initial values
  std::filesystem::path to;         ///< that where it ends

  /// "steps 3 to 4, global_step2 to global_step4"
  std::string text() const;
};

/// The intervals between the checkpoints in a run's folder, the first from initial values where no checkpoint
/// before it was removed. Checkpoints that a run left behind when it went back to an earlier one are no part
/// of them, but a line of `notes`. A checkpoint whose manifest is damaged is a line of `unread`; the
/// intervals before and behind it are one where one start of the run made both, else another such line.
struct Course {
  std::vector<Interval> intervals;
  std::vector<std::string> notes, unread;
};

/// The course of the run in `folder`; with `end` the interval alone that ends at this step, also where it is
/// the whole way from initial values, if the record knows of no other start. Throws Error{io} where there is
/// nothing to replay, naming what there is.
Course course_of(const std::filesystem::path& folder, const engine::RecordedSteps& record,
                 std::optional<std::int64_t> end);

}  // namespace sherd::cli
