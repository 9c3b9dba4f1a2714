#include "cli/verification/course.h"

#include <algorithm>

#include "base/excerpt.h"
#include "base/files.h"
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

/// Whether all steps up to this one are of one start of the run, from initial values.
bool is_of_one_start(const engine::RecordedSteps& record, std::int64_t step) {
  const auto before = [&](const engine::RecordedSteps::Start& start) { return start.steps_before < step; };
  return std::ranges::count_if(record.starts, before) == 1 && record.starts[0].steps_before == 0;
}

std::string names_of(const std::vector<SavedPoint>& points) {
  std::string out;
  for (const SavedPoint& point : points) out += (out.empty() ? "" : ", ") + point.folder.filename().string();
  return excerpt(out, 300);
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
  if (first.ordinal == 1 || (end == first.step && is_of_one_start(record, first.step)))
    out.intervals.push_back({0, first.step, "", first.folder});
  else
    out.notes.push_back(
        cat("checkpoints before ", first.folder.filename().string(),
            " are not there (training.keep_last removes them), or cannot be read: steps up to ", first.step,
            " cannot be replayed"));
  for (std::size_t i = 1; i < points.size(); ++i)
    out.intervals.push_back({points[i - 1].step, points[i].step, points[i - 1].folder, points[i].folder});
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
