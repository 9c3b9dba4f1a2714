#include "cli/inference/inference.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text/excerpt.h"
#include "cli/weights.h"
#include "comm/communicator.h"
#include "device/cuda.h"
#include "tensor/formats/stored_format.h"

namespace sherd::cli {
namespace {

/// The section `device` for generating: one rank has all of the machine, whatever share of it each rank had
/// in training.
config::Device device_section(const config::Device& of_run, const std::string& type) {
  static const std::vector<std::string> types = {"auto", "cpu", "cuda"};
  config::Device section;
  section.type = of_run.type;
  section.tf32 = of_run.tf32, section.fused_gelu = of_run.fused_gelu;
  if (type.empty()) {
    if (section.type == config::DeviceType::cuda)
      if (const device::CudaStatus status = device::cuda_status(); !status.usable())
        fail(ErrorKind::io, "the run was made on GPUs, and there is no CUDA device here: ", status.why_not,
             "; give --device cpu");
    return section;
  }
  const auto found = std::find(types.begin(), types.end(), type);
  if (found == types.end()) throw UsageError(cat("--device is auto, cpu or cuda, not '", excerpt(type), "'"));
  section.type = static_cast<config::DeviceType>(found - types.begin());
  return section;
}

/// The run's configuration with the layout that is asked for here: one rank, unless `overrides` say else.
config::Config config_of(const engine::CheckpointReader& reader, const std::vector<std::string>& overrides) {
  std::vector<std::string> all{"parallel.tensor=1",      "parallel.context=1",
                               "parallel.pipeline=1",    "parallel.virtual_stages=1",
                               "parallel.schedule=auto", "parallel.shard_size=null",
                               "parallel.expert=1"};
  for (const std::string& override : overrides) {
    if (!override.starts_with("parallel."))
      throw UsageError(cat("--set takes keys of the section parallel here, as parallel.tensor=2, not '",
                           excerpt(override), "'"));
    all.push_back(override);
  }
  config::Config config = configuration_of(reader, all);
  if (config.parallel.expert != 1)
    fail(ErrorKind::config, "parallel.expert is ", config.parallel.expert,
         ": every rank has all experts here; use tensor and pipeline ranks");
  if (config.parallel.context != 1)
    fail(ErrorKind::config, "parallel.context is ", config.parallel.context,
         ": every rank has whole texts; use tensor and pipeline ranks");
  return config;
}

WeightsPlace place_of(const CommandLine& line) {
  WeightsPlace place;
  const std::string offload = line.text("offload");
  if (offload == "cpu")
    place.offload = config::OffloadDevice::cpu;
  else if (offload == "nvme")
    place.offload = config::OffloadDevice::nvme;
  else if (!offload.empty() && offload != "none")
    throw UsageError(cat("--offload is cpu or nvme, not '", excerpt(offload), "'"));
  place.nvme_path = line.text("nvme-path");
  if (!place.nvme_path.empty() && place.offload != config::OffloadDevice::nvme)
    throw UsageError("--nvme-path goes with --offload nvme");
  place.device_memory_limit = static_cast<std::uint64_t>(line.amount("device-memory", 0, 1024));
  if (const std::string format = line.text("base-format"); !format.empty()) {
    place.base_format = tensor::parse_stored_format(format);
    if (!place.base_format)
      throw UsageError(
          cat("--base-format is compute, bf16, int8, nf4, fp4, nf4_double, fp4_double, mxfp4 or "
              "fp8, not '",
              excerpt(format), "'"));
  }
  return place;
}

/// The adapter of the checkpoint, or that of a folder; of prompts the one for `task`, without a network.
void take_adapter(config::Config& config, const std::string& folder, const std::string& task) {
  config::Adapter& adapter = config.training.adapter;
  adapter.init_from.clear();
  if (!folder.empty()) {
    using engine::CheckpointReader;
    if (holds_checkpoints(folder))
      CheckpointReader(engine::checkpoint_folder(folder)).verify_all(CheckpointReader::WhatToVerify::trained);
    // Some adapters are of given weights alone.
    auto section = nlohmann::ordered_json::parse(adapter_section(folder));
    section["training"]["adapter"]["init_from"] = folder;
    adapter =
        config::parse_text(section.dump(), cat("the adapter of ", excerpt(folder, 200))).training.adapter;
    adapter.init_from = folder;
  }
  const std::int64_t prompt = prompt_index(adapter, task);
  if (!adapter.has_prompt()) return;
  adapter.type = config::AdapterType::prompt_tuning;
  if (!adapter.prompt.tasks.empty())
    adapter.prompt.tasks = {adapter.prompt.tasks[static_cast<std::size_t>(prompt)]};
}

int ranks_of(const CommandLine& line, const config::Config& config) {
  if (!line.has("ranks")) return config.parallel.tensor * config.parallel.pipeline;
  return static_cast<int>(line.integer("ranks", 1, 1 << 16));
}

}  // namespace

std::int64_t prompt_index(const config::Adapter& adapter, const std::string& task) {
  const config::PromptKeys& prompt = adapter.prompt;
  if (!task.empty() && (!adapter.has_prompt() || prompt.tasks.empty()))
    throw UsageError(cat("--task ", excerpt(task), ": there are no prompts for several tasks here",
                         adapter.has_prompt() ? ", but one for all texts" : ""));
  if (task.empty() && prompt.tasks.size() > 1)
    throw UsageError(cat("there are prompts for ", prompt.task_names(), ": say which with --task NAME"));
  const std::int64_t found = task.empty() ? 0 : prompt.find(task);
  if (found < 0)
    throw UsageError(cat("no task is called '", excerpt(task), "'; there are ", prompt.task_names()));
  return found;
}

std::vector<std::int32_t> prompt_of(const data::Tokenizer& tokenizer, const std::string& text) {
  std::vector<std::int32_t> prompt = tokenizer.encode(text);
  const auto begin = tokenizer.begin_of_document();
  if (begin && (prompt.empty() || prompt[0] != *begin)) prompt.insert(prompt.begin(), *begin);
  if (prompt.empty()) prompt.push_back(tokenizer.end_of_document());
  return prompt;
}

void require_rows(std::span<const std::int32_t> ids, const data::Tokenizer& tokenizer, std::int64_t rows,
                  const std::string& where) {
  for (const std::int32_t id : ids)
    if (rows > 0 && id >= rows)
      fail(ErrorKind::data, where, where.empty() ? "" : ": ", "the text uses token ", id, " ('",
           excerpt(tokenizer.token(id)), "'), and the model has ids 0 to ", rows - 1,
           ": its tokenizer has tokens that it was never given; take that out of the text");
}

void add_inference_options(CommandLine& line) {
  line.value("checkpoint", "D", "a run's save_dir (its latest checkpoint) or one checkpoint's folder")
      .value("tag", "TAG", "of a run's checkpoints this one: global_stepN, best; not given: the latest")
      .value(
          "adapter", "DIR",
          "with this adapter, of PEFT, of AdapterHub or of a run's checkpoints, in place of its own, if any")
      .value("task", "NAME", "with this task's prompt, where training.adapter.tasks names several")
      .value("device", "auto|cpu|cuda", "where it runs; not given: what the run's device.type says")
      .value("offload", "cpu|nvme", "keep the weights there and bring them to the device block by block")
      .value("nvme-path", "DIR", "a folder on the drive for --offload nvme")
      .value(
          "base-format", "nf4|nf4_double|fp4|fp4_double|int8|fp8|mxfp4|bf16|compute",
          "keep the linear layers' weights so, or as the model computes (compute); not given: as the run did")
      .value("device-memory", "SIZE", "an error rather than more device memory than this, as 512MiB; 0: any",
             "0")
      .value("ranks", "N", "ranks in all; those beyond tensor x pipeline each keep a share of the weights")
      .list("set", "parallel.tensor=N",
            "this many ranks share the model, each on a GPU or a part of the cores of its own");
}

Inference::Inference(const CommandLine& line)
    : place_(place_of(line)),
      reader_(engine::checkpoint_folder(line.required("checkpoint"), line.text("tag"))) {
  reader_.verify_all();
  tokenizer_ = tokenizer_of(reader_);
  config_ = config_of(reader_, line.all("set"));
  take_adapter(config_, line.text("adapter"), line.text("task"));
  config_.device = device_section(config_.device, line.text("device"));
  ranks_ = ranks_of(line, config_);
  prepare_for_inference(config_, place_, ranks_);
}

void Inference::run(const std::string& advice, const std::function<void(const DistributedPtr&)>& body) const {
  try {
    // The world is these ranks alone: a launcher's variables may be left over, and nobody else would join.
    comm::run_local(ranks_, {.timeout_seconds = config_.parallel.timeout_seconds},
                    [&](comm::Communicator& world) {
                      const std::shared_ptr<comm::Communicator> borrowed(std::shared_ptr<void>(), &world);
                      body(std::make_shared<Distributed>(borrowed, world.rank(), ranks_));
                    });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::memory) throw;
    fail(ErrorKind::memory, error.what(), ". ", advice);
  }
}

}  // namespace sherd::cli
