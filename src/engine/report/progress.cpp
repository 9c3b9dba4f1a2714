#include "engine/report/progress.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "engine/report/report.h"

namespace sherd::engine {
namespace {

std::string bar(double share, int width, BarStyle style) {
  if (style.colour) return cyan + bar(share, width, {style.unicode, false}) + plain;
  if (!style.unicode) {
    const int full = static_cast<int>(share * (width - 2));
    return '[' + std::string(static_cast<std::size_t>(full), '#') +
           std::string(static_cast<std::size_t>(width - 2 - full), '.') + ']';
  }
  constexpr std::array<const char*, 8> eighths{"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int parts = static_cast<int>(share * width * 8);
  std::string out;
  for (int i = 0; i < width; ++i) {
    const int here = std::clamp(parts - 8 * i, 0, 8);
    out += here == 8 ? "█" : here > 0 ? eighths[static_cast<std::size_t>(here)] : "░";
  }
  return out;
}

/// A figure on the line; higher `rank` goes first when space is short.
struct Field {
  int rank;
  std::string text;
};

/// The contents of a line.
struct Line {
  std::string counter;
  double share = 0;  ///< 0…1; negative: unknown, and there is no bar
  std::vector<Field> fields;
};

double share_of(double done, double total) {
  return total > 0 ? std::clamp(done / total, 0.0, 1.0) : 0;
}

std::vector<Field> fields_of(const ProgressState& state) {
  std::vector<Field> fields{{1, printed("loss %.4f", state.loss)}};
  if (state.val_loss) fields.push_back({4, printed("val %.4f", *state.val_loss)});
  fields.push_back({3, human_count(state.per_s) + " " + state.unit});
  if (state.mfu) fields.push_back({5, printed("MFU %.0f%%", *state.mfu * 100)});
  if (state.seconds_left >= 0) fields.push_back({2, "ETA " + human_seconds(state.seconds_left)});
  return fields;
}

int length_of(const std::vector<Field>& fields) {
  std::size_t length = 0;
  for (const Field& field : fields) length += 2 + field.text.size();  // ASCII only
  return static_cast<int>(length);
}

/// As much of it as fits.
std::string fitted(const Line& whole, int width, BarStyle style) {
  constexpr int shortest_bar = 10, longest_bar = 40;
  bool with_bar = whole.share >= 0;
  const std::string percent = with_bar ? printed(" %3.0f%%", std::floor(whole.share * 100)) : "";
  const int fixed = static_cast<int>(whole.counter.size() + percent.size());
  std::vector<Field> fields = whole.fields;
  // The bar matters more than validation loss and MFU, and less than the rest.
  constexpr int bar_rank = 3;
  const auto room = [&] { return width - fixed - length_of(fields); };
  while (room() < (with_bar ? shortest_bar + 1 : 0)) {
    const auto least = std::max_element(fields.begin(), fields.end(),
                                        [](const Field& a, const Field& b) { return a.rank < b.rank; });
    if (with_bar && (least == fields.end() || least->rank <= bar_rank))
      with_bar = false;
    else if (least != fields.end())
      fields.erase(least);
    else
      break;
  }
  std::string line = whole.counter;
  if (with_bar) line += ' ' + bar(whole.share, std::min(longest_bar, room() - 1), style);
  line += percent;
  for (const Field& field : fields) line += "  " + field.text;
  if (room() < 0)
    line.resize(static_cast<std::size_t>(std::max(0, width)));  // a very narrow window: all ASCII by now
  return line;
}

}  // namespace

BarStyle BarStyle::of(int descriptor) {
  return {locale_is_utf8(), shows_colours(descriptor)};
}

std::string format_bar(const ProgressState& state, int width, BarStyle style) {
  const double share = share_of(static_cast<double>(state.step), static_cast<double>(state.total_steps));
  return fitted({cat(state.title, state.step, '/', state.total_steps), share, fields_of(state)}, width,
                style);
}

std::string format_work(const WorkState& state, int width, BarStyle style) {
  const auto amount = [&](double value) {
    if (state.unit.empty()) return human_bytes(static_cast<std::uint64_t>(value));
    return value < 1e5 ? printed("%.0f", value) : human_count(value);
  };
  Line line{cat(state.title, ": ", amount(state.done)),
            state.total > 0 ? share_of(state.done, state.total) : -1,
            {}};
  if (state.total > 0) line.counter += cat(" of ", amount(state.total));
  if (!state.unit.empty()) line.counter += cat(' ', state.unit);
  if (!state.more.empty()) line.fields.push_back({4, state.more});
  if (const double rate = state.seconds > 0 ? state.done / state.seconds : 0; rate > 0) {
    line.fields.push_back({3, state.unit.empty() ? amount(rate) + "/s" : human_count(rate) + " /s"});
    if (state.total > state.done)
      line.fields.push_back({2, "ETA " + human_seconds((state.total - state.done) / rate)});
  }
  return fitted(line, width, style);
}

std::string format_plain(const ProgressState& state) {
  std::string line =
      cat(state.title, "step ", state.step, '/', state.total_steps, printed("  loss %.5f", state.loss));
  if (state.val_loss) line += printed("  val_loss %.5f", *state.val_loss);
  for (const auto& [name, value] : state.metrics) line += "  " + name + printed(" %.5f", value);
  line += printed("  lr %.3e", state.lr);
  for (std::size_t i = 0; state.lrs.size() > 1 && i < state.lrs.size(); ++i)
    line += printed(i == 0 ? "  lrs %.3e" : ",%.3e", state.lrs[i]);
  line += printed("  grad_norm %.3f", state.grad_norm);
  line += "  " + human_count(state.per_s) + " " + state.unit;
  if (state.mfu) line += printed("  mfu %.3f", *state.mfu);
  if (state.seconds_left >= 0) line += "  eta " + human_seconds(state.seconds_left);
  return line;
}

Progress::Progress(int descriptor, std::int64_t total_steps, std::int64_t every)
    : descriptor_(descriptor),
      total_steps_(total_steps),
      every_(std::max<std::int64_t>(1, every)),
      terminal_(is_terminal(descriptor)),
      style_(BarStyle::of(descriptor)),
      line_(descriptor) {}

Progress::~Progress() {
  try {
    finish();
  } catch (...) {  // the line goes, and is not drawn again
  }
}

double Progress::seconds_left(std::int64_t step) {
  const auto now = Clock::now();
  if (last_step_ >= 0 && step > last_step_) {
    const double pace =
        std::chrono::duration<double>(now - last_step_time_).count() / static_cast<double>(step - last_step_);
    seconds_per_step_ = seconds_per_step_ == 0 ? pace : 0.9 * seconds_per_step_ + 0.1 * pace;
  }
  last_step_ = step, last_step_time_ = now;
  return seconds_per_step_ == 0
             ? -1
             : seconds_per_step_ * static_cast<double>(std::max<std::int64_t>(0, total_steps_ - step));
}

void Progress::update(ProgressState state, bool evaluated) {
  if (!shows_progress()) return;
  state.total_steps = total_steps_;
  const double left = seconds_left(state.step);
  if (state.seconds_left < 0) state.seconds_left = left;
  state_ = state;
  if (terminal_) return line_.show([this](int columns) { return format_bar(state_, columns, style_); });
  if (!evaluated)
    state.val_loss.reset(), state.metrics.clear();  // an old figure on a new line of a log misleads
  if (!evaluated && state.step % every_ != 0 && state.step != total_steps_) return;
  write_terminal(descriptor_, format_plain(state) + '\n');  // one that is gone must not end hours of training
}

void Progress::finish() {
  line_.leave([this](int columns) { return format_bar(state_, columns, style_); });
}

void WorkBar::show(WorkState state) {
  line_.show([&](int columns) {
    const auto now = std::chrono::steady_clock::now();
    if (title_ != state.title) title_ = state.title, begun_ = now;
    state.seconds = std::chrono::duration<double>(now - begun_).count();
    return format_work(state, columns, style_);
  });
}

}  // namespace sherd::engine
