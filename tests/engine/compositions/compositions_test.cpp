// Random compositions of model, layout, schedule, stage, tiers and optimizer: one layout trains, another goes
// on from its checkpoint. To the bit each is what the plainest layout with its bits computes, states come out
// of a checkpoint as they went in, and all follow one rank to rounding. A case that waits for ever is an
// error that names the collective. SHERD_FUZZ_CASES sets how many (CI: 24), SHERD_FUZZ_SEED the first one's
// seed, SHERD_FUZZ_SECONDS the deadline of every wait (5).
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "support/logical_states.h"
#include "support/temp_folder.h"
#include "tests/engine/compositions/rules.h"
#include "tests/engine/compositions/watch.h"

namespace sherd::test {
namespace {

using Clock = std::chrono::steady_clock;

/// A run's report, and all states when it began and ended.
struct Leg {
  RunResult result;
  LogicalStates start, end;
};

Leg run(const std::string& what, RunSpec spec, int from, int last = 0) {
  const Watch watch(what);
  LogicalStateCollector start, end;
  std::vector<char> begun(static_cast<std::size_t>(spec.ranks));
  spec.between_steps = [&](Engine& engine) {
    char& seen = begun[static_cast<std::size_t>(engine.dist().rank())];
    if (!std::exchange(seen, 1)) start.add(engine);
  };
  spec.at_end = [&](Engine& engine) { end.add(engine); };
  Leg out;
  out.result = train_local(spec, from, last);
  out.start = start.take(), out.end = end.take();
  return out;
}

/// Values of `name` from `got` and from place `skip` of `want`, to the bit.
std::string difference(const char* name, const std::vector<double>& got, const std::vector<double>& want,
                       std::size_t skip) {
  if (got.empty() || skip + got.size() > want.size())
    return cat(got.size(), " values of its ", name, ", of ", want.size(), "; ");
  for (std::size_t i = 0; i < got.size() && skip + i < want.size(); ++i)
    if (std::memcmp(&got[i], &want[skip + i], sizeof(double)) != 0)
      return cat(name, " of its step ", i, ": ", got[i], " for ", want[skip + i], "; ");
  return "";
}

std::string difference(const LogicalStates& got, const LogicalStates& want) {
  for (const auto& [name, bytes] : want) {
    const auto found = got.find(name);
    if (found == got.end() || found->second.size() != bytes.size())
      return name + " is missing, or of another size; ";
    if (found->second == bytes) continue;
    std::size_t differing = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) differing += found->second[i] != bytes[i];
    return cat(name, " differs in ", differing, " of ", bytes.size(), " bytes; ");
  }
  return got.size() > want.size() ? "states that are not wanted; " : "";
}

/// From the step of `want` on that `skip` says; `whole`: to the same end.
std::string difference(const Leg& got, const Leg& want, std::size_t skip, bool whole) {
  std::string out = difference("loss", got.result.losses, want.result.losses, skip) +
                    difference("norm", got.result.norms, want.result.norms, skip) +
                    difference("loss scale", got.result.scales, want.result.scales, skip);
  if (whole) out += difference(got.end, want.end);
  return out;
}

/// L2 over all fp32 weights; of others than the same ones, infinite.
double distance(const LogicalStates& a, const LogicalStates& b) {
  double squares = 0;
  for (const auto& [name, bytes] : a) {
    const auto other = b.find(name);
    if (!name.starts_with("fp32.")) continue;
    if (other == b.end() || other->second.size() != bytes.size()) return HUGE_VAL;
    for (std::size_t i = 0; i < bytes.size(); i += sizeof(float)) {
      float x = 0, y = 0;
      std::memcpy(&x, &bytes[i], sizeof x), std::memcpy(&y, &other->second[i], sizeof y);
      squares += (double{x} - y) * (double{x} - y);
    }
  }
  return std::sqrt(squares);
}

/// The largest distances from one rank so far, by precision.
struct Farthest {
  double loss = 0, norm = 0, weights = 0;
};

/// 0 of values that both are infinite or none, as the norms of a step that is skipped.
double apart(double a, double b) {
  return std::isfinite(a) || std::isfinite(b) ? std::abs(a - b) : 0;
}

/// Judges one composition.
class Checker {
 public:
  Checker(const Composition& composition, Farthest& farthest) : c_(composition), farthest_(farthest) {}

  /// Names the rule that does not hold; empty: all hold. Throws what a run throws.
  std::string check() {
    const RunSpec first = prepared(c_.first), second = prepared(c_.second);
    alone_ = run(named("one rank"), one_rank(first), 0);
    const Leg begun = run(named("first layout"), first, 0, c_.middle);
    std::string out = judge("the first layout", begun, first, 0, true);
    if (!out.empty()) return out;
    const Leg gone_on = run(named("second layout"), second, c_.middle);
    if (keeps_states(first, second)) out = difference(gone_on.start, begun.end);
    if (!out.empty()) return "loaded by the second layout: " + out;
    const bool one_class = !bits_of(first).empty() && bits_of(first) == bits_of(one_rank(first));
    return judge("the second layout", gone_on, second, c_.middle, one_class);
  }

 private:
  RunSpec prepared(RunSpec spec) const {
    spec.directory = folder_.path().string(), spec.nvme_path = nvme_.path().string();
    spec.timeout_seconds = deadline_seconds();
    return spec;
  }
  std::string named(const char* part) const { return cat(part, " of ", c_.text()); }

  /// A leg against the plainest one with its bits, and against one rank.
  std::string judge(const char* name, const Leg& got, const RunSpec& spec, int from, bool so_far_one_class) {
    const bool at_end = from > 0;
    std::string out;
    if (const std::string bits = bits_of(spec); !bits.empty()) {
      if (so_far_one_class && bits == bits_of(one_rank(spec))) {
        out = difference(got, alone_, static_cast<std::size_t>(from), at_end);
      } else {
        RunSpec plain = plainest(spec);
        if (!at_end) plain.steps = c_.middle;
        out = difference(got, run(named("plainest layout"), plain, from), 0, true);
      }
      if (!out.empty()) return cat(name, " is not to the bit what it should be (", bits, "): ", out);
    }
    // Replicas of a 1-bit optimizer compute other than one rank does.
    if (!takes_rule(spec, "OneBit")) out = strays(got, spec, from);
    return out.empty() ? out : cat(name, " strays from one rank: ", out);
  }

  std::string strays(const Leg& got, const RunSpec& spec, int from) {
    const Tolerance tolerance = tolerance_of(spec);
    for (std::size_t i = 0; i < got.result.losses.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(from) + i;
      const double loss = apart(got.result.losses[i], alone_.result.losses[at]);
      const double want = alone_.result.norms[at], difference = apart(got.result.norms[i], want);
      const double norm = difference == 0 ? 0 : difference / std::abs(want);
      farthest_.loss = std::max(farthest_.loss, loss), farthest_.norm = std::max(farthest_.norm, norm);
      if (!(loss <= tolerance.loss)) return cat("loss by ", loss, " in step ", at);
      if (!(norm <= tolerance.norm)) return cat("norm by ", norm, " in step ", at);
    }
    if (from == 0) return "";
    const double changed = distance(alone_.end, alone_.start),
                 weights = distance(got.end, alone_.end) / changed;
    farthest_.weights = std::max(farthest_.weights, weights);
    return weights <= tolerance.weights ? "" : cat("weights by ", weights, " of what changed");
  }

  const Composition& c_;
  Farthest& farthest_;
  const sherd::testing::TempFolder folder_, nvme_;
  Leg alone_;
};

struct Outcome {
  std::string failure, refusal;
};

Outcome outcome_of(const Composition& composition, Farthest& farthest) {
  const LastWords words(composition.text());
  try {
    return {Checker(composition, farthest).check(), ""};
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::config) return {"", error.what()};
    return {error.what(), ""};
  } catch (const std::exception& error) {
    return {error.what(), ""};
  }
}

/// A failing composition, with what it fails without taken out, as far as there is time.
Composition shrunk(Composition failing) {
  const auto until = Clock::now() + std::chrono::seconds(from_environment("SHERD_FUZZ_SHRINK", 20));
  Farthest ignored;
  const auto attempt = [&](const Composition& simpler) {
    if (Clock::now() < until && simpler.text() != failing.text() &&
        !outcome_of(simpler, ignored).failure.empty())
      failing = simpler;
  };
  for (const Simplification simplify : simpler_problems()) {
    Composition simpler = failing;
    simplify(simpler.first), simplify(simpler.second);
    attempt(simpler);
  }
  for (RunSpec Composition::*leg : {&Composition::first, &Composition::second})
    for (const Simplification simplify : simpler_layouts()) {
      Composition simpler = failing;
      simplify(simpler.*leg);
      attempt(simpler);
    }
  return failing;
}

TEST(Compositions, AreEqualToOneRankAndToThemselves) {
  const std::uint64_t cases = from_environment("SHERD_FUZZ_CASES", 24),
                      seed = from_environment("SHERD_FUZZ_SEED", 1);
  std::map<std::string, Farthest> farthest;
  std::map<std::string, int> refusals;
  std::uint64_t refused = 0, failed = 0;
  double longest = 0;
  set_log_level(LogLevel::error);
  for (std::uint64_t i = 0; i < cases; ++i) {
    const Composition composition = draw_composition(seed + i);
    const auto start = Clock::now();
    const Outcome outcome = outcome_of(composition, farthest[composition.first.dtype]);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    longest = std::max(longest, seconds);
    if (!outcome.refusal.empty()) ++refused, ++refusals[outcome.refusal];
    if (outcome.failure.empty()) continue;
    ++failed;
    const std::string simpler = failed > 3 ? "" : "simpler:\n" + shrunk(composition).text();
    ADD_FAILURE() << outcome.failure << "\n" << composition.text() << simpler;
  }
  std::printf("%d compositions: %d refused, %d failed; the longest took %.1f s\n", static_cast<int>(cases),
              static_cast<int>(refused), static_cast<int>(failed), longest);
  for (const auto& [text, count] : refusals) std::printf("refused %d times: %s\n", count, text.c_str());
  for (const auto& [dtype, far] : farthest)
    std::printf("%s: farthest from one rank: loss %.2g, norm %.2g, weights %.2g\n", dtype.c_str(), far.loss,
                far.norm, far.weights);
  set_log_level(LogLevel::info);
  EXPECT_EQ(refused, 0u) << "compositions that are drawn are valid";
}

}  // namespace
}  // namespace sherd::test
