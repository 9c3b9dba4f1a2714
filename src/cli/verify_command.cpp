#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "cli/verification/replay.h"
#include "comm/gather.h"
#include "engine/report/report.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"

namespace sherd::cli {
namespace {

struct VerifyRequest {
  std::filesystem::path run;
  std::optional<std::int64_t> step;
  int ranks = 0;  ///< 0: as many as saved, or the launcher's
  std::vector<std::string> overrides;
  nlohmann::ordered_json* json = nullptr;  ///< where rank 0 puts what was found; null: it is printed as text
};

/// All that is to be replayed, read before ranks begin.
struct VerifyPlan {
  engine::RecordedSteps record;
  std::vector<std::string> notes, unread;
  std::vector<Replay> replays;
  nlohmann::ordered_json* json = nullptr;  ///< the request's
};

/// How far all replays agree.
enum class Agreement : std::uint8_t {
  equal,      ///< to the bit
  near,       ///< to rounding, where bits are not promised
  unchecked,  ///< so far, and not all could be compared
  apart,      ///< not even to rounding
  differs     ///< where bits are promised
};

/// The result of all replays so far.
struct ReplayVerdict {
  Agreement agreement = Agreement::equal;
  bool compared = false;  ///< any interval

  void add(const ReplayVerdict& other) {
    agreement = std::max(agreement, other.agreement);
    compared = compared || other.compared;
  }
};

bool under_launcher() {
  return comm::launcher() != comm::Launcher::none;
}

VerifyPlan plan_of(const VerifyRequest& request) {
  VerifyPlan plan;
  plan.record = engine::RecordedSteps::read(request.run);
  Course course = course_of(request.run, plan.record, request.step);
  plan.notes = std::move(course.notes), plan.unread = std::move(course.unread);
  // A run that goes on may have made further steps, whose lines come before their checkpoint.
  plan.record = engine::RecordedSteps::read(request.run);
  const int ranks = under_launcher() && comm::launched_ranks() > 0 ? comm::launched_ranks() : request.ranks;
  plan.json = request.json;
  for (const Interval& interval : course.intervals) {
    plan.replays.push_back(prepare_replay(interval, plan.record, ranks, request.overrides));
    plan.replays.back().announced = !plan.json;
  }
  return plan;
}

/// With the fewest digits that read back to the same fp32 number.
std::string digits_of(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), static_cast<float>(value)).ptr;
  return {text.data(), end};
}

void print_states(const engine::Comparison& states) {
  if (states.agrees())
    std::printf("  %s and what else is saved agree to the bit (%s elements)\n",
                counted(states.tensors, "tensor").c_str(),
                engine::human_count(static_cast<double>(states.elements)).c_str());
  if (states.differing_elements > 0)
    std::printf("  of %s %lld differ, in %lld of %lld elements\n", counted(states.tensors, "tensor").c_str(),
                static_cast<long long>(states.differing_tensors),
                static_cast<long long>(states.differing_elements), static_cast<long long>(states.elements));
  if (const auto& first = states.first)
    std::printf(
        "  first tensor that differs: %s, from element %lld on: %s in the checkpoint, %s here; %lld of %lld "
        "elements differ, by at most %s\n",
        first->name.c_str(), static_cast<long long>(first->first), digits_of(first->saved).c_str(),
        digits_of(first->here).c_str(), static_cast<long long>(first->differing),
        static_cast<long long>(first->elements),
        counted(static_cast<std::int64_t>(first->ulps), "ulp").c_str());
  for (const std::string& line : states.others) std::printf("  %s\n", line.c_str());
}

/// "step 5 is", "steps 3, 5 to 7 are"
std::string steps_are(const std::vector<std::int64_t>& steps) {
  std::string out;
  for (std::size_t i = 0, last = 0; i < steps.size(); i = last + 1) {
    for (last = i; last + 1 < steps.size() && steps[last + 1] == steps[last] + 1;) ++last;
    out += cat(out.empty() ? "" : ", ", steps[i]);
    if (last > i) out += cat(last > i + 1 ? " to " : ", ", steps[last]);
  }
  return steps.size() == 1 ? cat("step ", out, " is") : cat("steps ", excerpt(out, 300), " are");
}

void print_report(const Replay& replay, const ReplayReport& report) {
  if (!report.unread.empty()) {
    std::printf("%s: cannot be checked: %s\n", replay.interval.text().c_str(), report.unread.c_str());
    std::fflush(stdout);
    return;
  }
  if (!report.data.empty()) std::printf("  %s\n", report.data.c_str());
  if (report.step)
    std::printf("  first step that differs: step %lld: %s was %s and is %s\n",
                static_cast<long long>(report.step->step), report.step->what.c_str(),
                report.step->recorded.c_str(), report.step->here.c_str());
  else if (report.compared_steps > 0)
    std::printf("  losses and gradient norms of %s agree to the bit\n",
                counted(report.compared_steps, "step").c_str());
  if (!report.lost.empty())
    std::printf("  %s missing in %s, where the run had written what came of it: that cannot be compared\n",
                steps_are(report.lost).c_str(), engine::steps_file);
  const auto unknown = report.steps - report.compared_steps - std::ssize(report.lost);
  if (report.start_lost)
    std::printf(
        "  the start of the run that saved %s is missing in %s, which has steps of others: losses "
        "cannot be compared\n",
        replay.interval.to.filename().string().c_str(), engine::steps_file);
  else if (unknown > 0)
    std::printf("  of %s no losses are recorded in %s: tensors alone are compared\n",
                counted(unknown, "step").c_str(), engine::steps_file);
  print_states(report.states);
  if (!report.missing.empty() && !report.agrees())
    std::printf(
        "  apart: losses by %.2g, gradient norms by %.2g of themselves%s\n", report.loss_error,
        report.norm_error,
        report.states.weights_error
            ? cat(", weights by ", engine::printed("%.2g", *report.states.weights_error), " of their way")
                  .c_str()
            : "");
  std::fflush(stdout);
}

Agreement judge(const Replay& replay, const ReplayReport& report) {
  const Agreement least = report.is_whole() ? Agreement::equal : Agreement::unchecked;
  if (!report.unread.empty() || report.agrees()) return least;
  if (report.missing.empty()) return Agreement::differs;
  const bool near = report.agrees_nearly(replay.saved.precision.compute);
  return near ? std::max(least, Agreement::near) : Agreement::apart;
}

const char* name_of(Agreement agreement) {
  constexpr const char* names[] = {"equal", "near", "unchecked", "apart", "differs"};
  return names[static_cast<std::size_t>(agreement)];
}

nlohmann::ordered_json json_of(const Replay& replay, const ReplayReport& report, Agreement agreement) {
  nlohmann::ordered_json out{{"interval", replay.interval.text()}, {"agreement", name_of(agreement)}};
  if (!report.unread.empty()) return out["unread"] = report.unread, out;
  const engine::Comparison& states = report.states;
  out.update({{"steps", report.steps},
              {"compared_steps", report.compared_steps},
              {"tensors", states.tensors},
              {"differing_tensors", states.differing_tensors},
              {"elements", states.elements},
              {"differing_elements", states.differing_elements},
              {"not_promised", report.missing},
              {"lost_steps", report.lost},
              {"others", states.others}});
  if (!report.data.empty()) out["data"] = report.data;
  if (const auto& step = report.step)
    out["first_step"] = {
        {"step", step->step}, {"what", step->what}, {"recorded", step->recorded}, {"here", step->here}};
  if (const auto& first = states.first)
    out["first_tensor"] = {{"name", first->name}, {"element", first->first}, {"ulps", first->ulps}};
  return out;
}

/// Replays an interval on this rank, and returns what rank 0 judges.
ReplayVerdict verify_interval(const DistributedPtr& dist, const VerifyPlan& plan, const Replay& replay,
                              const std::shared_ptr<const engine::TokenData>& data) {
  const ReplayReport report = run_replay(dist, replay, plan.record, data);
  const ReplayVerdict mine{judge(replay, report), report.unread.empty()};
  if (dist->rank() == 0 && plan.json)
    (*plan.json)["intervals"].push_back(json_of(replay, report, mine.agreement));
  else if (dist->rank() == 0)
    print_report(replay, report);
  return comm::gather_records(dist->world(), mine, "verdict")[0];
}

void print_notes(const VerifyPlan& plan) {
  if (plan.json) {
    (*plan.json)["notes"] = plan.notes, (*plan.json)["unread"] = plan.unread;
    return;
  }
  for (const auto* lines : {&plan.notes, &plan.unread})
    for (const std::string& line : *lines) std::printf("%s\n", line.c_str());
  if (plan.record.starts.empty())
    std::printf("the folder has no %s: what the run computed on, and its losses, are not known\n",
                engine::steps_file);
}

const char* text_of(const ReplayVerdict& verdict) {
  switch (verdict.agreement) {
    case Agreement::equal:
      return "the run agrees to the bit";
    case Agreement::near:
      return "the run agrees to rounding: equal bits are not promised for what was replayed here, as said "
             "above";
    case Agreement::unchecked:
      return verdict.compared
                 ? "what could be checked of the run agrees, and NOT all of it could be, as said above"
                 : "NOTHING of the run could be checked, as said above";
    case Agreement::apart:
      return "the run does NOT agree, not even to rounding: equal bits are not promised for what was "
             "replayed "
             "here, as said above";
    default:
      return "the run does NOT agree";
  }
}

void print_verdict(const ReplayVerdict& verdict, nlohmann::ordered_json* json) {
  if (json) {
    (*json)["agreement"] = name_of(verdict.agreement), (*json)["compared"] = verdict.compared;
    return print_json(*json);
  }
  std::printf("%s\n", text_of(verdict));
  std::fflush(stdout);
}

ReplayVerdict before_replays(const VerifyPlan& plan) {
  return {plan.unread.empty() ? Agreement::equal : Agreement::unchecked};
}

ReplayVerdict verify_here(const VerifyPlan& plan) {
  print_notes(plan);
  ReplayVerdict all = before_replays(plan);
  for (const Replay& replay : plan.replays) {
    engine::takes_gpus(replay.config);  // throws where it needs one and has none
    const auto data = engine::open_token_data(replay.config);
    planning::require_fit(replay.reparse, data->vocab_size, {replay.ranks, replay.ranks},
                          planning::this_machine(replay.config));
    ReplayVerdict found{Agreement::differs};
    launch_ranks(replay.ranks,
                 [&](const DistributedPtr& dist) {
                   const ReplayVerdict verdict = verify_interval(dist, plan, replay, data);
                   if (dist->rank() == 0) found = verdict;
                 },
                 {.timeout_seconds = replay.config.parallel.timeout_seconds});
    all.add(found);
  }
  print_verdict(all, plan.json);
  return all;
}

/// One rank's part under a launcher.
ReplayVerdict verify_launched(const VerifyPlan& plan, const DistributedPtr& dist) {
  std::string intervals;  // checkpoints of a run under way may go between two looks
  for (const Replay& replay : plan.replays) intervals += replay.interval.text() + "; ";
  engine::require_same({{"list of checkpoints in the run's folder", intervals}}, *dist, ErrorKind::io);
  if (dist->rank() == 0) print_notes(plan);
  ReplayVerdict all = before_replays(plan);
  for (const Replay& replay : plan.replays) {
    std::shared_ptr<const engine::TokenData> data;
    comm::gather_results(dist->world(), "data opened", [&] {
      engine::takes_gpus(replay.config);
      data = engine::open_token_data(replay.config);
      return true;
    });
    engine::require_same_setup(replay.config, *dist);
    engine::require_same_data(*data, *dist);
    const engine::GpuSharing sharing = engine::share_gpus_of_world(replay.config, *dist);
    comm::gather_results(dist->world(), "memory check", [&] {
      planning::require_fit(replay.reparse, data->vocab_size, {dist->world_size(), dist->local_size()},
                            planning::this_machine(replay.config, sharing));
      return true;
    });
    all.add(verify_interval(dist, plan, replay, data));
  }
  if (dist->rank() == 0) print_verdict(all, plan.json);
  dist->world().barrier({.label = "end of verification", .scalar = true});
  return all;
}

ReplayVerdict verify_run(const VerifyRequest& request) {
  if (!under_launcher()) return verify_here(plan_of(request));
  VerifyPlan plan;
  std::exception_ptr unread;  // told to the others, who wait, once they are met
  try {
    plan = plan_of(request);
  } catch (const Error&) {
    unread = std::current_exception();
  }
  ReplayVerdict all{Agreement::differs};
  try {
    launch_ranks(request.ranks, [&](const DistributedPtr& dist) {
      if (unread) std::rethrow_exception(unread);
      all = verify_launched(plan, dist);
    });
  } catch (const Error&) {
    if (unread) std::rethrow_exception(unread);  // also where the others did not come
    throw;
  }
  return all;
}

}  // namespace

CommandLine verify_line() {
  CommandLine line(
      "verify",
      "Checks a run: trains the steps between its checkpoints again, and compares losses, "
      "gradient norms and all that the next checkpoint holds with what was saved, to the bit "
      "where docs/guarantees.md promises that. Writes nothing into the run's folder, in which a "
      "run may be under way. Ends with exit code 5 where the run does not agree, or not all of it can be "
      "checked.",
      "RUN [--step K] [--ranks N] [--set a.b.c=V]... [--json]");
  line.list("run", "RUN", "the run's folder, its training.save_dir (or without the option's name)")
      .value("step", "K", "only the steps that end at the checkpoint of step K; by default all there are")
      .value("ranks", "N",
             "local ranks in this process, by default as many as saved; mpirun, srun and torchrun bring "
             "their own")
      .list("set", "a.b.c=V",
            "override a key of the machine or the layout, as data.path=PREFIX; not what is trained")
      .json()
      .rest_to("run");
  return line;
}

void verify_command(const CommandLine& line) {
  if (line.all("run").size() != 1) throw UsageError("name one run's folder. See 'sherd verify --help'");
  VerifyRequest request;
  request.run = line.all("run").front();
  if (line.has("step")) request.step = line.integer("step", 1);
  if (line.has("ranks")) request.ranks = static_cast<int>(line.integer("ranks", 1, 1024));
  request.overrides = line.all("set");
  nlohmann::ordered_json results{{"run", request.run.string()}};
  if (line.has("json")) request.json = &results;
  if (verify_run(request).agreement >= Agreement::unchecked) throw Finding{does_not_agree};
}

}  // namespace sherd::cli
