#include "cli/verification/course.h"

#include <algorithm>

#include "base/files.h"
#include "base/text/excerpt.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

struct SavedPoint {
  std::int64_t ordinal = 0, step = 0;
  fs::path folder;
};

/// The whole checkpoints in a folder, in the order in which they were saved. Those that go while this looks
/// (training.keep_last) are left out, and so are those that cannot be read, of which `unread` gets a line.
std::vector<SavedPoint> saved_points(const fs::path& folder, std::vector<std::string>& unread) {
  std::vector<SavedPoint> out;
  for (const fs::path& entry : engine::entries_of(folder)) {
    const fs::path path = entry / "manifest.json";
    std::error_code gone;
    if (engine::is_leftover(entry.filename().string()) || !fs::exists(path, gone)) continue;
    try {
      const auto manifest = engine::Manifest::from_json(read_file(path), path);
      out.push_back({manifest.ordinal, manifest.global_steps, entry});
    } catch (const Error& error) {
      if (fs::exists(path, gone))
        unread.push_back(cat(entry.filename().string(), " cannot be checked: ", error.what()));
    }
  }
  std::ranges::sort(out, [](const auto& a, const auto& b) {
    return std::tie(a.ordinal, a.step) < std::tie(b.ordinal, b.step);
  });
  return out;
}

/// Takes out what lay ahead when the run went back: steps that it came to again later, or did not come to any
/// more.
std::vector<SavedPoint> last_course(const std::vector<SavedPoint>& points, std::vector<std::string>& notes) {
  std::vector<SavedPoint> out;
  for (const SavedPoint& point : points) {
    for (; !out.empty() && out.back().step >= point.step; out.pop_back())
      notes.push_back(cat(out.back().folder.filename().string(), " was saved before ",
                          point.folder.filename().string(),
                          ", which the run came to after it had gone back: it is not looked at"));
    out.push_back(point);
  }
  return out;
}

/// Whether the record tells that one start of the run made the steps behind `begin`, up to `end`.
bool is_of_one_start(const engine::RecordedSteps& record, std::int64_t begin, std::int64_t end) {
  const auto is_before = [&](const auto& start) { return start.steps_before <= begin; };
  const auto is_between = [&](const auto& start) {
    return start.steps_before > begin && start.steps_before < end;
  };
  return std::ranges::any_of(record.starts, is_before) && std::ranges::none_of(record.starts, is_between);
}

/// Whether the way from initial values to the first checkpoint can be replayed: it has no other before it, or
/// only such as cannot be read; or it is asked for.
bool has_beginning(const SavedPoint& first, const Course& course, const engine::RecordedSteps& record,
                   std::optional<std::int64_t> end) {
  const std::int64_t unread = std::ssize(course.unread);
  const bool asked = end == first.step || (unread > 0 && first.ordinal <= unread + 1);
  return first.ordinal == 1 || (asked && is_of_one_start(record, 0, first.step));
}

std::string names_of(const std::vector<SavedPoint>& points) {
  const auto name = [](const SavedPoint& point) { return point.folder.filename().string(); };
  return excerpt(joined_text(points, ", ", name), 300);
}

std::string lines_of(const std::vector<std::string>& unread) {
  std::string out;
  for (const std::string& line : unread) out += "; " + line;
  return out;
}

}  // namespace

std::string Interval::text() const {
  const std::string steps = end == begin + 1 ? cat("step ", end) : cat("steps ", begin + 1, " to ", end);
  return cat(steps, ", from ", from.empty() ? "the beginning" : from.filename().string(), " to ",
             to.filename().string());
}

Course course_of(const fs::path& folder, const engine::RecordedSteps& record,
                 std::optional<std::int64_t> end) {
  Course out;
  const std::vector<SavedPoint> points = last_course(saved_points(folder, out.unread), out.notes);
  if (points.empty())
    fail(ErrorKind::io, "there is no checkpoint in '", folder.string(),
         "': name the folder of a run, its training.save_dir", lines_of(out.unread));
  const SavedPoint& first = points.front();
  if (has_beginning(first, out, record, end))
    out.intervals.push_back({0, first.step, "", first.folder});
  else
    out.notes.push_back(
        cat("checkpoints before ", first.folder.filename().string(),
            " are not there (training.keep_last removes them), or cannot be read: steps up to ", first.step,
            " cannot be replayed"));
  const bool some_unread = !out.unread.empty();
  for (std::size_t i = 1; i < points.size(); ++i) {
    const SavedPoint &from = points[i - 1], &to = points[i];
    const Interval interval{from.step, to.step, from.folder, to.folder};
    if (end && to.step != *end) continue;
    // Each start trains by a configuration of its own, and the one between may stand in what cannot be read.
    if (some_unread && to.ordinal > from.ordinal + 1 && !is_of_one_start(record, from.step, to.step))
      out.unread.push_back(
          cat(interval.text(), ": cannot be checked: a checkpoint between cannot be read, and ",
              engine::steps_file, " does not tell that the run went on there by the same configuration"));
    else
      out.intervals.push_back(interval);
  }
  std::erase_if(out.intervals, [&](const Interval& i) { return i.end == i.begin || (end && i.end != *end); });
  if (out.intervals.empty())
    fail(ErrorKind::io, "there is nothing to replay in '", folder.string(), "'",
         end ? cat(" that ends at step ", *end) : "",
         ": it takes a checkpoint and the one before, or the first one of a run; there are ",
         names_of(points), lines_of(out.unread));
  if (end) {  // others than the one that is asked for
    out.notes.insert(out.notes.end(), out.unread.begin(), out.unread.end());
    out.unread.clear();
  }
  return out;
}

}  // namespace sherd::cli
