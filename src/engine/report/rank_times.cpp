#include "engine/report/rank_times.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "comm/gather.h"
#include "engine/engine.h"
#include "engine/report/report.h"

namespace sherd::engine {
namespace {

using Part = RankTimes::Part;

double middle(std::vector<double> values) {
  const auto at = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

float part_of(const RankTimes& times, int part) {
  return times.parts[static_cast<std::size_t>(part)];
}

std::string shown_ms(double ms) {
  return printed(ms < 9.995 ? "%.2f" : ms < 99.95 ? "%.1f" : "%.0f", ms);
}

}  // namespace

std::string_view name_of(Part part) {
  constexpr std::string_view names[] = {"forward", "backward",       "update",
                                        "data",    "waits for NVMe", "the rest"};
  return names[part];
}

float RankTimes::own() const {
  return std::accumulate(parts.begin(), parts.end(), 0.0f);
}

void RankTimes::add(const RankTimes& other) {
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i] += other.parts[i];
  wait += other.wait;
}

// ---- stragglers ----

StragglerWatch::StragglerWatch(std::vector<int> stages)
    : stages_(std::move(stages)),
      ratios_(stages_.size()),
      excess_(stages_.size()),
      sums_(stages_.size()),
      known_(stages_.size()) {}

template <class Value>
double StragglerWatch::median(std::size_t count, std::size_t rank, const Value& value) const {
  std::vector<double> values;
  for (std::size_t r = 0; r < count; ++r)
    if (stages_[r] == stages_[rank]) values.push_back(value(r));
  const auto at = values.begin() + (std::ssize(values) - 1) / 2;
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

std::optional<Part> StragglerWatch::slow_at(std::span<const RankTimes> ranks, std::size_t rank) const {
  const double usual = median(ranks.size(), rank, [&](std::size_t r) { return ranks[r].own(); });
  if (ranks[rank].own() <= factor * usual) return {};
  Part worst = RankTimes::rest;
  double most = -1;
  for (int part = 0; part < RankTimes::part_count; ++part) {
    const double more = part_of(ranks[rank], part) -
                        median(ranks.size(), rank, [&](std::size_t r) { return part_of(ranks[r], part); });
    if (more > most) most = more, worst = static_cast<Part>(part);
  }
  return worst;
}

std::vector<std::string> StragglerWatch::add(std::span<const RankTimes> ranks) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const double usual = median(ranks.size(), r, [&](std::size_t other) { return ranks[other].own(); });
    ratios_[r].push_back(usual > 0 ? ranks[r].own() / usual : 1);
    excess_[r].push_back(ranks[r].own() - usual);
    sums_[r].add(ranks[r]);
  }
  if (++steps_ < window) return {};
  std::vector<std::string> lines = judge();
  steps_ = 0;
  for (std::size_t r = 0; r < stages_.size(); ++r) ratios_[r].clear(), excess_[r].clear(), sums_[r] = {};
  return lines;
}

/// Chance makes one rank or the other slow for a while, and at this or that.
bool StragglerWatch::is_news(Known& known, std::optional<Part> part) const {
  constexpr int fast_again = 5;
  known.fast = part ? 0 : known.fast + 1;
  if (known.fast >= fast_again) known.told.reset();
  if (!part) return false;
  const bool twice = std::exchange(known.found, part) == part;
  if (known.told == part || (known.told && !twice)) return false;
  known.told = part;
  return true;
}

std::vector<std::string> StragglerWatch::judge() {
  constexpr std::size_t most_lines = 4;
  std::vector<std::string> lines;
  std::size_t more = 0;
  for (std::size_t r = 0; r < stages_.size(); ++r) {
    const std::optional<Part> part =
        middle(ratios_[r]) > factor && middle(excess_[r]) > least_ms ? slow_at(sums_, r) : std::nullopt;
    if (!is_news(known_[r], part)) continue;
    if (lines.size() == most_lines) {
      ++more;
      continue;
    }
    const auto per_step = [&](double sum) { return shown_ms(sum / window); };
    const auto usual = [&](auto value) {
      return per_step(median(stages_.size(), r, [&](std::size_t other) { return value(sums_[other]); }));
    };
    const auto of_part = [&](const RankTimes& times) { return part_of(times, *part); };
    lines.push_back(cat("rank ", r, " is slow: ", per_step(sums_[r].own()), " ms of its own a step, against ",
                        usual([](const RankTimes& times) { return times.own(); }),
                        " ms in the median of its peers, over ", window, " steps; most of that in ",
                        name_of(*part), " (", per_step(of_part(sums_[r])), " against ", usual(of_part),
                        " ms)"));
  }
  if (more > 0)
    lines.push_back(
        cat("so ", more == 1 ? "is " : "are ", counted(static_cast<std::int64_t>(more), "other rank")));
  return lines;
}

// ---- the ranks of a run ----

RankWatch::RankWatch(Engine& engine)
    : engine_(engine), measures_(engine.dist().world_size() > 1 && !engine.device().accelerator()) {
  if (!measures_) return;
  for (int r = 0; r < engine.dist().world_size(); ++r)
    stages_.push_back(engine.groups().grid().coordinate(comm::Axis::pipeline, r));
  stragglers_ = std::make_unique<StragglerWatch>(stages_);
  totals_.resize(stages_.size());
}

void RankWatch::begin_step() {
  before_ = waited_so_far();
}

void RankWatch::end_step(double seconds) {
  if (!measures_) return;
  const WaitTotals waits = waited_so_far() - before_;
  const StepTimes& busy = engine_.last_step().busy;
  const auto ms = [](double of_seconds) { return static_cast<float>(of_seconds * 1e3); };
  RankTimes mine;
  mine.parts = {static_cast<float>(busy.forward),
                static_cast<float>(busy.backward),
                static_cast<float>(busy.update),
                ms(waits.data),
                ms(waits.storage),
                0};
  mine.wait = ms(waits.ranks);
  mine.parts[RankTimes::rest] = std::max(0.0f, ms(seconds) - mine.wait - mine.own());
  last_ = comm::gather_records(engine_.dist().world(), mine, "times of ranks");
  if (engine_.dist().rank() != 0) return;
  ++steps_;
  for (std::size_t r = 0; r < last_.size(); ++r) totals_[r].add(last_[r]);
  for (const std::string& line : stragglers_->add(last_)) log_warning(line);
}

std::string RankWatch::table() const {
  return steps_ == 0 ? "" : ranks_table(totals_, stages_, steps_);
}

std::string ranks_table(std::span<const RankTimes> totals, std::vector<int> stages, std::int64_t steps) {
  constexpr std::size_t most_rows = 16;
  const StragglerWatch watch(stages);
  const bool pipeline = std::any_of(stages.begin(), stages.end(), [](int stage) { return stage > 0; });
  std::vector<std::size_t> order(totals.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto slower = [&](std::size_t a, std::size_t b) { return totals[a].own() > totals[b].own(); };
  std::string of = "a step of each rank, ms";
  if (totals.size() > most_rows) {
    std::stable_sort(order.begin(), order.end(), slower);
    const std::size_t usual = order[order.size() / 2];
    order.resize(most_rows - 1);
    order.push_back(usual);
    of = cat("a step of the slowest ranks, ms");
  }
  std::vector<std::vector<std::string>> rows{{of, "its own", "data", "NVMe", "waits for ranks", "slow at"}};
  for (std::size_t i = 0; i < order.size(); ++i) {
    const RankTimes& times = totals[order[i]];
    const auto mean = [&](float sum) { return shown_ms(sum / static_cast<double>(steps)); };
    const std::optional<Part> slow = watch.slow_at(totals, order[i]);
    const bool usual = totals.size() > most_rows && i + 1 == order.size();
    rows.push_back({cat("rank ", order[i], pipeline ? cat(", stage ", stages[order[i]]) : "",
                        usual ? cat(" (the median of ", totals.size(), ")") : ""),
                    mean(times.own()), mean(times.parts[RankTimes::data]),
                    mean(times.parts[RankTimes::storage]), mean(times.wait),
                    std::string(slow ? name_of(*slow) : "-")});
  }
  return format_table(rows);
}

}  // namespace sherd::engine
