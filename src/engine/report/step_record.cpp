#include "engine/report/step_record.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/arena.h"
#include "base/cpu_isa.h"
#include "base/error.h"
#include "base/version.h"
#include "device/accelerator.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/engine.h"
#include "tensor/library_version.h"

namespace sherd::engine {
namespace {

constexpr StepFileWords record_words{"the record of steps", "a record of steps",
                                     "Move the file away: what it tells is for `sherd verify` alone"};

std::string processor_set() {
  const std::string isa(name_of(cpu_isa()));
  if (cpu_has_bf16_tiles()) return isa + ", bf16 on tiles";
  return cpu_has_bf16_products() ? isa + ", bf16 in vectors" : isa;
}

/// JSON has no NaN and no infinity: null.
nlohmann::ordered_json number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

std::optional<double> number_in(const nlohmann::json& line, const char* key) {
  const nlohmann::json& value = line.at(key);
  return value.is_null() ? std::nullopt : std::optional(value.get<double>());
}

RunFacts facts_in(const nlohmann::json& line) {
  return {line.at("sherd"),   line.at("device"), line.at("instruction_set"), line.at("libraries"),
          line.at("threads"), line.at("ranks"),  line.at("world"),           line.at("micro_batch")};
}

void add_line(const nlohmann::json& line, RecordedSteps& out) {
  const std::int64_t step = line.at("step");
  if (line.contains(start_key)) {
    out.starts.push_back({line.at(start_key), step, facts_in(line)});
  } else {
    require(!out.starts.empty() && (out.steps.empty() || out.steps.back().step < step),
            "steps follow the start of a run, in order");
    out.steps.push_back({step, number_in(line, "loss"), number_in(line, "grad_norm"), line.at("loss_scale"),
                         line.at("skipped"), out.starts.size() - 1});
  }
}

}  // namespace

RunFacts RunFacts::of(const Engine& engine) {
  const device::Accelerator* gpu = engine.device().accelerator();
  RunFacts out;
  out.version = sherd::version();
  out.device = gpu ? gpu->name() : "cpu";
  out.instruction_set = processor_set();
  out.libraries =
      gpu ? cat(tensor::matmul_library(), ", cuDNN ", tensor::cudnn_version()) : tensor::matmul_library();
  out.threads = engine.device().arena().threads();
  out.ranks = engine.groups().world().size();
  out.world = engine.groups().world().name();
  out.micro_batch = engine.config().batch.micro_batch_size;
  return out;
}

StepRecord::StepRecord(const std::filesystem::path& folder, std::int64_t steps_before, const RunFacts& facts)
    : start_(new_save_id()), lines_(folder / steps_file, steps_before + 1, record_words) {
  nlohmann::ordered_json line;
  line["step"] = steps_before;
  line[start_key] = start_;
  line["sherd"] = facts.version;
  line["device"] = facts.device;
  line["instruction_set"] = facts.instruction_set;
  line["libraries"] = facts.libraries;
  line["threads"] = facts.threads;
  line["ranks"] = facts.ranks;
  line["world"] = facts.world;
  line["micro_batch"] = facts.micro_batch;
  lines_.write(line.dump());
}

void StepRecord::write(const StepMetrics& step) {
  nlohmann::ordered_json line;
  line["step"] = step.step;
  line["loss"] = number(step.loss);
  line["grad_norm"] = number(step.grad_norm);
  line["loss_scale"] = number(step.loss_scale);
  line["skipped"] = step.skipped;
  lines_.write(line.dump());
}

RecordedSteps RecordedSteps::read(const std::filesystem::path& folder) {
  RecordedSteps out;
  std::ifstream in(folder / steps_file, std::ios::binary);
  std::string text;
  for (std::int64_t number = 1; std::getline(in, text) && !in.eof(); ++number) try {
      add_line(nlohmann::json::parse(text), out);
    } catch (const std::exception&) {
      fail(ErrorKind::data, "line ", number, " of '", (folder / steps_file).string(),
           "' is no valid record of a step: move the file away, and only tensors are compared");
    }
  return out;
}

const RecordedSteps::Step* RecordedSteps::find(std::int64_t step) const {
  const auto found = std::ranges::lower_bound(steps, step, {}, &Step::step);
  return found == steps.end() || found->step != step ? nullptr : &*found;
}

std::vector<std::int64_t> RecordedSteps::lost(std::int64_t begin, std::int64_t end,
                                              std::size_t first_starts) const {
  const auto is_behind = [](std::int64_t step) {
    return [step](const Start& start) { return start.steps_before < step; };
  };
  const auto later = starts.begin() + static_cast<std::ptrdiff_t>(first_starts);
  std::vector<std::int64_t> out;
  for (std::int64_t step = begin + 1; step <= end; ++step)
    if (!find(step) && std::any_of(starts.begin(), later, is_behind(step)) &&
        std::none_of(later, starts.end(), is_behind(step)))
      out.push_back(step);
  return out;
}

}  // namespace sherd::engine
