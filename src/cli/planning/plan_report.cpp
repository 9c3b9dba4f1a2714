#include "cli/planning/plan_report.h"

#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

using engine::StepTime;
using planning::Plan;
using planning::PlanLayout;
using tensor::KernelFamily;
using OrderedJson = nlohmann::ordered_json;

constexpr const char* recomputes[] = {"none", "selective", "full"};
constexpr double seconds_per_day = 86400;

/// Seconds with four digits.
std::string in_seconds(double seconds) {
  return engine::printed("%.4g", seconds);
}
std::string percent(double share) {
  return engine::printed("%.1f %%", 100 * share);
}

int data_of(const PlanLayout& layout) {
  return layout.ranks / (layout.tensor * layout.context * layout.pipeline);
}

double of_family(const StepTime& time, KernelFamily family) {
  return time.kernels[static_cast<std::size_t>(family)];
}

/// The parts of a step, in the words of reports.
struct StepPart {
  const char* name;
  double (*seconds)(const StepTime&);
};
constexpr StepPart step_parts[] = {
    {"products", [](const StepTime& t) { return of_family(t, KernelFamily::gemm); }},
    {"attention", [](const StepTime& t) { return of_family(t, KernelFamily::attention); }},
    {"other kernels",
     [](const StepTime& t) {
       return std::accumulate(t.kernels.begin(), t.kernels.end(), 0.0) - of_family(t, KernelFamily::gemm) -
              of_family(t, KernelFamily::attention);
     }},
    {"exchanges of layers", [](const StepTime& t) { return t.exchange; }},
    {"waits for parameters", [](const StepTime& t) { return t.gather; }},
    {"waits for gradients", [](const StepTime& t) { return t.reduce; }},
    {"update", [](const StepTime& t) { return t.update; }},
    {"idle in the pipeline", [](const StepTime& t) { return t.idle; }},
};

/// The part that makes a step slower than the best one.
std::string why_slower(const StepTime& time, const StepTime& best) {
  const StepPart* most = nullptr;
  double difference = 5e-4 * best.seconds;  // less is no reason
  for (const StepPart& part : step_parts)
    if (const double more = part.seconds(time) - part.seconds(best); more > difference)
      most = &part, difference = more;
  return most ? cat("+", in_seconds(difference), " s ", most->name) : "";
}

std::string heading(const PlanReport& r) {
  const std::int64_t nodes = (r.ranks + r.machine.devices - 1) / r.machine.devices;
  return cat(engine::human_count(static_cast<double>(r.parameters)), " parameters on ",
             r.goal == planning::Goal::fewest_gpus ? "up to " : "", counted(r.ranks, "rank"), ", ",
             counted(nodes, "machine"), " of ", r.machine.name, "; ",
             counted(static_cast<std::int64_t>(r.result.tried), "layout"), " tried, ", r.result.too_large,
             " of them too large\n\n");
}

std::string table(const PlanReport& r) {
  std::vector<std::vector<std::string>> rows{{"layout", "micro-batch", "ZeRO", "recompute", "step s",
                                              "tokens/s/rank", "MFU", "device", "bubble", "exposed",
                                              "slower by"}};
  const StepTime& best = r.result.best.front().time;
  for (const Plan& plan : r.result.best) {
    const StepTime& t = plan.time;
    std::vector<std::string> row = layout_cells(plan.layout);
    row.insert(row.end(),
               {in_seconds(t.seconds), engine::human_count(plan.tokens_per_second() / plan.layout.ranks),
                percent(t.mfu()), engine::human_bytes(plan.memory), percent(t.bubble),
                percent((t.exchange + t.gather + t.reduce) / t.seconds), why_slower(t, best)});
    rows.push_back(std::move(row));
  }
  return engine::format_table(rows);
}

std::string step_of(const StepTime& time) {
  std::vector<std::vector<std::string>> rows{{"a step of the best", "s", "share"}};
  for (const StepPart& part : step_parts)
    if (const double seconds = part.seconds(time); seconds > 0.0005 * time.seconds)
      rows.push_back({part.name, in_seconds(seconds), percent(seconds / time.seconds)});
  return cat("\n", engine::format_table(rows));
}

double days_of(const PlanReport& r) {
  return r.tokens / r.result.best.front().tokens_per_second() / seconds_per_day;
}

std::string training_of(const PlanReport& r) {
  if (r.tokens == 0) return "";
  const Plan& best = r.result.best.front();
  const double days = days_of(r);
  return cat("\n", engine::human_count(r.tokens), " tokens take ", engine::printed("%.3g", days), " days, ",
             engine::human_count(days * 24 * best.layout.ranks), " GPU-hours\n");
}

std::string keys_of(const PlanReport& r) {
  const Plan& best = r.result.best.front();
  if (!best.lacks.empty()) return cat("\nIt does not fit: ", best.lacks, ".\n");
  if (!r.written.empty())
    return cat("\nThe best is written to ", r.written, ": ", train_line(r.written, best.layout.ranks), "\n");
  std::string out = "\nThe best:";
  for (const auto& [key, value] : r.result.best.front().keys()) out += cat(" --set ", key, "=", value);
  return out + "\n";
}

OrderedJson json_of(const Plan& plan) {
  OrderedJson out;
  const StepTime& t = plan.time;
  for (const auto& [key, value] : plan.keys()) out["keys"][key] = value;
  out["ranks"] = plan.layout.ranks, out["data"] = data_of(plan.layout);
  out["fits"] = plan.lacks.empty();
  out["step_s"] = t.seconds, out["tokens_per_s"] = plan.tokens_per_second();
  out["flops"] = t.flops, out["mfu"] = t.mfu(), out["bubble"] = t.bubble;
  out["device_bytes"] = plan.memory, out["host_bytes_of_machine"] = plan.host_memory;
  for (const StepPart& part : step_parts) out["parts_s"][part.name] = part.seconds(t);
  return out;
}

}  // namespace

std::string train_line(const std::string& config, int ranks) {
  return cat("sherd train --config ", config, " --ranks ", ranks);
}

std::vector<std::string> layout_cells(const PlanLayout& layout) {
  return {cat(layout.text(data_of(layout)), layout.optimizer_on_host ? ", optimizer on the host" : ""),
          std::to_string(layout.micro_batch), std::to_string(layout.stage),
          recomputes[static_cast<int>(layout.recompute)]};
}

std::string text_of(const PlanReport& r) {
  std::string out = heading(r);
  if (r.result.tried == 0)
    return cat(out, "No layout is one that a run accepts: ",
               r.result.refused.empty() ? "these ranks cannot be cut evenly by the sizes and the batch that "
                                          "are given; 'sherd estimate' says which"
                                        : r.result.refused,
               "\n");
  if (r.result.best.empty())
    return cat(
        out, "Nothing fits", r.result.closest.empty() ? "" : cat(": ", r.result.closest),
        ". Use more machines (--nodes), let states wait elsewhere (zero_optimization.offload_param), or "
        "shorten sequences.\n");
  return cat(out, table(r), step_of(r.result.best.front().time), training_of(r), keys_of(r));
}

std::string json_of(const PlanReport& r) {
  OrderedJson out;
  out["machine"] = r.machine.name, out["parameters"] = r.parameters;
  out["tried"] = r.result.tried, out["too_large"] = r.result.too_large;
  out["plans"] = OrderedJson::array();
  for (const Plan& plan : r.result.best) out["plans"].push_back(json_of(plan));
  if (r.tokens > 0 && !r.result.best.empty()) {
    out["tokens"] = r.tokens, out["days"] = days_of(r);
    out["gpu_hours"] = days_of(r) * 24 * r.result.best.front().layout.ranks;
  }
  return out.dump(2) + "\n";
}

std::string text_of(const std::vector<planning::GenerationTime>& times, const config::Machine& machine,
                    const planning::GenerationShape& shape) {
  std::vector<std::vector<std::string>> rows{{"tensor ranks", "batch", "first token s", "further token ms",
                                              "tokens/s", "tokens/s/rank", "device", ""}};
  for (const planning::GenerationTime& time : times)
    rows.push_back({std::to_string(time.tensor), std::to_string(time.batch), in_seconds(time.prefill),
                    engine::printed("%.4g", 1e3 * time.decode), engine::human_count(time.tokens_per_second),
                    engine::human_count(time.tokens_per_second / time.tensor),
                    engine::human_bytes(time.memory), time.fits ? "" : "does not fit"});
  return cat("Generation on ", machine.name, ": prompts of ", counted(shape.prompt, "token"), ", ",
             shape.tokens, " that follow\n\n", engine::format_table(rows));
}

std::string json_of(const std::vector<planning::GenerationTime>& times) {
  OrderedJson out = OrderedJson::array();
  for (const planning::GenerationTime& time : times)
    out.push_back({{"tensor", time.tensor},
                   {"batch", time.batch},
                   {"first_token_s", time.prefill},
                   {"further_token_s", time.decode},
                   {"tokens_per_s", time.tokens_per_second},
                   {"device_bytes", time.memory},
                   {"fits", time.fits}});
  return out.dump(2) + "\n";
}

}  // namespace sherd::cli
