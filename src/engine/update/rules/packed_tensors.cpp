#include "engine/update/rules/packed_tensors.h"

#include <algorithm>

#include "base/error.h"

namespace sherd::engine {

using autograd::Parameter;
using tensor::Range;

namespace {

struct LogicalRun {
  Range rows;
  int tensor;
};

/// The rows of all tensors, in order.
std::vector<LogicalRun> logical_runs(const Parameter& parameter, std::int64_t rows, const std::string& name) {
  std::vector<LogicalRun> out;
  const auto& tensors = parameter.packing.tensors;
  if (tensors.empty()) out.push_back({{0, rows}, 0});
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (const Range& range : tensors[i]) out.push_back({range, static_cast<int>(i)});
  std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.rows.begin < b.rows.begin; });
  std::int64_t end = 0;
  for (const auto& [range, tensor] : out) {
    require(range.begin == end && range.size() >= 0 && range.end <= rows, "parameter '",
            parameter.name.empty() ? name : parameter.name, "' packs tensors that are not the first of its ",
            rows, " rows, each once");
    end = range.end;
  }
  return out;
}

void append(std::vector<PackedRun>& to, const PackedRun& run) {
  if (run.begin == run.end) return;
  if (!to.empty() && to.back().tensor == run.tensor && to.back().end == run.begin)
    to.back().end = run.end;
  else
    to.push_back(run);
}

}  // namespace

std::vector<PackedRun> packed_runs(const Parameter& parameter, const std::string& name) {
  const tensor::Slice slice = parameter.logical_slice();
  std::vector<PackedRun> out;
  if (slice.logical().rank() == 0) return {{0, 1, 0}};
  const std::int64_t here = slice.shape()[0];
  const std::int64_t width = here == 0 ? 0 : slice.numel() / here;
  const std::vector<LogicalRun> runs = logical_runs(parameter, slice.logical()[0], name);
  auto next = runs.begin();
  std::int64_t local = 0;
  for (const Range& block : slice.blocks()[0]) {
    while (next != runs.end() && next->rows.end <= block.begin) ++next;
    for (auto run = next; run != runs.end() && run->rows.begin < block.end; ++run) {
      const std::int64_t begin = std::max(run->rows.begin, block.begin),
                         end = std::min(run->rows.end, block.end);
      append(out, {(local + begin - block.begin) * width, (local + end - block.begin) * width, run->tensor});
    }
    local += block.size();
  }
  return out;
}

std::vector<PackedRun> measured_runs(const Parameter& parameter) {
  std::vector<PackedRun> out;
  for (PackedRun run : packed_runs(parameter)) {
    if (parameter.packing.published_as_one) run.tensor = 0;
    append(out, run);
  }
  return out;
}

std::int64_t unpadded(const Parameter& parameter) {
  const std::vector<PackedRun> runs = packed_runs(parameter);
  return runs.empty() ? 0 : runs.back().end;
}

std::vector<MeasuredTensor> measured_tensors(const Parameter& parameter) {
  const auto packed = static_cast<int>(parameter.packing.tensors.size());
  std::vector<MeasuredTensor> out;
  for (int i = 0; i < (parameter.packing.published_as_one ? 1 : std::max(packed, 1)); ++i)
    out.push_back({&parameter, i});
  return out;
}

std::string MeasuredTensor::name() const {
  const autograd::Packing& packing = parameter->packing;
  const bool several = !packing.published_as_one && packing.tensors.size() > 1;
  return several ? cat(parameter->name, "/", index) : parameter->name;
}

void for_each_measured(const Parameter& parameter, std::int64_t begin, std::int64_t end,
                       const std::function<void(std::int64_t, std::int64_t, const MeasuredTensor&)>& visit) {
  std::int64_t at = begin;
  for (const PackedRun& run : measured_runs(parameter)) {
    const std::int64_t from = std::max(begin, run.begin), to = std::min(end, run.end);
    if (from >= to) continue;
    visit(from, to, {&parameter, run.tensor});
    at = to;
  }
  if (at < end) visit(at, end, {&parameter, -1});
}

}  // namespace sherd::engine
