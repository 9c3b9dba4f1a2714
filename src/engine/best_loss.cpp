#include "engine/best_loss.h"

#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "engine/report/report.h"

namespace sherd::engine {
namespace {

constexpr const char *loss_key = "best_val_loss", *step_key = "best_step",
                     *without_key = "evaluations_without_improvement";

template <class Number>
std::optional<Number> number_in(const std::map<std::string, std::string>& client, const char* key) {
  const auto found = client.find(key);
  if (found == client.end()) return {};
  const std::string& text = found->second;
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || text.starts_with('-'))
    fail(ErrorKind::data, "the checkpoint's client string ", key, " is '", excerpt(text), "', not a number");
  return number;
}

}  // namespace

void BestLoss::see(std::int64_t step, double loss) {
  if (std::isfinite(loss) && (!best_ || loss < *best_)) {
    best_ = loss, step_ = step, without_ = 0;
  } else {
    ++without_;
  }
}

void BestLoss::save(std::map<std::string, std::string>& client) const {
  if (best_) client[loss_key] = exact(*best_), client[step_key] = std::to_string(step_);
  if (best_ || without_ > 0) client[without_key] = std::to_string(without_);
}

void BestLoss::restore(const std::map<std::string, std::string>& client) {
  best_ = number_in<double>(client, loss_key);
  step_ = number_in<std::int64_t>(client, step_key).value_or(0);
  without_ = number_in<std::int64_t>(client, without_key).value_or(0);
}

}  // namespace sherd::engine
