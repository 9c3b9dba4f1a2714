#include <algorithm>

#include "base/text/excerpt.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

const std::vector<std::string> devices = {"none", "cpu", "nvme"};
constexpr const char* nothing_on_nvme = "no effect: no state lives on NVMe";

bool on_nvme(const Offload& offload) {
  return offload.device == OffloadDevice::nvme;
}

bool uses_nvme(const Config& config) {
  return on_nvme(config.zero.offload_param) || on_nvme(config.zero.offload_optimizer);
}

bool activations_on_nvme(const Config& config) {
  return config.training.nvme_checkpointing && config.training.recompute == Recompute::full;
}

// ---- offload_param, offload_optimizer ----

using Side = Offload Zero::*;
constexpr Side of_params = &Zero::offload_param, of_optimizer = &Zero::offload_optimizer;

std::string no_effect_with(OffloadDevice device) {
  return cat("no effect with device \"", devices[static_cast<std::size_t>(device)], "\"");
}

/// Why a key of one of the two sections cannot matter: where its device is none, or not NVMe though the key
/// is of that alone.
std::function<std::string(const Config&)> without_device(Side side, bool nvme_alone) {
  return [=](const Config& config) {
    const OffloadDevice device = (config.zero.*side).device;
    const bool idle = device == OffloadDevice::none || (nvme_alone && device == OffloadDevice::cpu);
    return idle ? no_effect_with(device) : "";
  };
}

std::string without_nvme(const Config& config) {
  return uses_nvme(config) ? "" : nothing_on_nvme;
}

std::function<std::string(const Config&)> without_nvme_device(Side side) {
  return [side](const Config& config) {
    const Offload& offload = config.zero.*side;
    const bool idle = !offload.nvme_path.empty() && !on_nvme(offload) && !activations_on_nvme(config);
    return idle ? no_effect_with(offload.device) : "";
  };
}

std::vector<Key<Offload>> common_offload_keys(Side side, Key<Offload> buffer_count, const char* about_device,
                                              const char* unlike_device = "") {
  using O = Offload;
  return {choice("device", &O::device, devices, "\"cpu\"",
                 {{"disk", "nvme"},
                  {"ssd", "nvme"},
                  {"host", "cpu"},
                  {"ram", "cpu"},
                  {"memory", "cpu"},
                  {"gpu", "none"},
                  {"cuda", "none"}})
              .means(about_device, unlike_device),
          std::move(buffer_count),
          boolean("pin_memory", &O::pin_memory)
              .means("page-locked host memory, which GPUs reach faster", "0.16: false by default",
                     idle([idle = without_device(side, false)](const Config& config) {
                       const std::string why = idle(config);
                       return why.empty() ? "cannot matter on a CPU device" : why;
                     })),
          text("nvme_path", &O::nvme_path, "\"/mnt/nvme\"")
              .unset("")
              .means("folder on the drive that holds the scratch file; of an absolute path only the last "
                     "folder is made",
                     Concerns::machine, idle(without_nvme_device(side)), by("none; required for nvme"))};
}

Key<Offload> buffer_count_key() {
  return integer("buffer_count", &Offload::buffer_count, "7", 0, std::numeric_limits<std::int32_t>::max());
}

Table<Offload> offload_param_table() {
  using O = Offload;
  const auto unused = without_device(of_params, true);
  Table<O> table{
      Auto::to_default,
      common_offload_keys(
          of_params,
          buffer_count_key().means(
              "nvme: staging buffers in host memory, each for one block that is read ahead", idle(unused)),
          "tier of the parameters, stage 3 only: device memory, host memory or NVMe")};
  append(table.keys,
         {integer("buffer_size", &O::buffer_size, "1000", 0)
              .means("nvme: elements of a staging buffer, at least those of the largest block; checked at "
                     "the start",
                     idle(unused)),
          integer("max_in_cpu", &O::max_in_cpu, "1000", 0)
              .means("nvme: parameters per rank that stay in host memory all the same; 0: all on NVMe",
                     idle(unused))});
  return table;
}

Table<Offload> offload_optimizer_table() {
  using O = Offload;
  Table<O> table{
      Auto::to_default,
      common_offload_keys(
          of_optimizer,
          buffer_count_key().means(
              "staging buffers in host memory, each for a chunk of parameters with all their states",
              "counts tensors: four per chunk with Adam", idle(without_nvme)),
          "tier of the optimizer's states, stages 1 to 3; at 2 and 3 gradients then lie in host memory",
          "nvme at stage 3 only")};
  append(
      table.keys,
      {boolean("pipeline_read", &O::pipeline_read)
           .means("nvme: read the next chunks while one is updated", "false by default", idle(without_nvme)),
       boolean("pipeline_write", &O::pipeline_write)
           .means("nvme: write the last chunks while one is updated", "false by default", idle(without_nvme)),
       real("ratio", &O::ratio, "0.5", 0, 1)
           .means("share of the states to offload; below 1 at stage 3 only", "needs its own CPU Adam below 1",
                  idle(without_device(of_optimizer, false)))});
  append(table.keys, foreign_keys<O>("zero_optimization.offload_optimizer"));
  return table;
}

/// DeepSpeed's switches from before the two sections.
Key<Zero> deprecated_switch(std::string_view name, Offload Zero::*field, const std::string& section) {
  return custom<Zero>(name, "true",
                      [=](Zero& zero, const Value& value) {
                        const bool on = value.boolean();
                        if (on) (zero.*field).device = OffloadDevice::cpu;
                        value.note(cat("deprecated; write \"", section, R"(": {"device": ")",
                                       on ? "cpu" : "none", "\"}"));
                      })
      .takes({"true or false", R"({"type": "boolean"})"})
      .means(cat("old name of `", section, ".device` \"cpu\""), by("off"));
}

void require_one(const Value& side, const char* name, std::int64_t count, const char* whose = "device") {
  if (count < 1) side.at(name).error("must be at least 1 with ", whose, " \"nvme\", not ", count);
}

/// The rules of one section: `name`, or `deprecated`, the switch that means it.
void check_side(const Zero& zero, const Given& given, const Value& section, Side side, const char* name,
                const char* deprecated) {
  const Offload& offload = zero.*side;
  const bool old = given.contains(deprecated), current = given.contains(name);
  const auto key = [&](const std::string& of) {
    return Value{*given.at(of), join(section.path, of), section.context};
  };
  if (old && current)
    key(deprecated)
        .error("means \"", name, "\" with device \"cpu\", and that section is given too; remove one of ",
               "the two");
  // The update stages parameters on NVMe through the same buffers.
  if (side == of_optimizer && current && on_nvme(zero.offload_param))
    require_one(key(name), "buffer_count", offload.buffer_count, "offload_param's device");
  if (offload.device == OffloadDevice::none) return;
  const Value here = key(old ? deprecated : name);
  const std::string& device = devices[static_cast<std::size_t>(offload.device)];
  // Parameters that no stage shards were left where they are by now (zero_keys.cpp).
  if (zero.stage < 1)
    here.error("device \"", device,
               "\" needs stage 1, 2 or 3, which shard the optimizer's states, not stage ", zero.stage,
               "; set zero_optimization.stage to 1, or the device to \"none\"");
  if (offload.ratio < 1 && zero.stage < 3)
    here.at("ratio").error(offload.ratio, " needs stage 3, not stage ", zero.stage,
                           "; set zero_optimization.stage to 3, or ratio to 1");
  if (offload.device != OffloadDevice::nvme) return;
  if (offload.nvme_path.empty())
    here.error("device \"nvme\" needs \"nvme_path\", a directory on the drive that is to hold the states");
  require_one(here, "buffer_count", offload.buffer_count);
  require_one(here, "buffer_size", offload.buffer_size);
}

// ---- aio ----

Key<Aio> block_size_key() {
  static constexpr std::int64_t page = 4096, most = std::int64_t{1} << 30;
  const Takes range = integers(page, most);
  return integer("block_size", &Aio::block_size, "65536", page, most)
      .then([](Aio& aio, const Value& value) {
        if (aio.block_size % page != 0)
          value.error("must be a multiple of ", page, " bytes, not ", value.node.brief(),
                      "; the next one is ", (aio.block_size / page + 1) * page);
      })
      .takes({range.words + ", a multiple of 4096",
              R"({"type": "integer", "minimum": 4096, "maximum": 1073741824, "multipleOf": 4096})"})
      .means("bytes of one request");
}

Table<Aio> aio_table() {
  Table<Aio> table{
      Auto::is_a_value,
      {choice("backend", &Aio::backend, {"auto", "io_uring", "threads"}, "\"threads\"")
           .means("what moves the bytes: io_uring or an error, threads with positional calls, auto: io_uring "
                  "where kernel and file system allow it",
                  "is not there: always libaio"),
       block_size_key(), integer("queue_depth", &Aio::queue_depth, "32", 1, 4096).means("requests under way"),
       integer("thread_count", &Aio::thread_count, "4", 1, 256)
           .means("threads: how many there are",
                  "0.19 reads `intra_op_parallelism` alone, and not the old name",
                  also("intra_op_parallelism"),
                  idle([](const Config& c) { return c.aio.backend == Aio::Backend::io_uring; },
                       "no effect with backend \"io_uring\"")),
       boolean("single_submit", &Aio::single_submit)
           .means("io_uring: hand requests to the kernel one by one",
                  idle([](const Config& c) { return c.aio.backend == Aio::Backend::threads; },
                       "no effect with backend \"threads\"")),
       boolean("overlap_events", &Aio::overlap_events).means("start requests while others are under way"),
       boolean("checksums", &Aio::checksums)
           .means("CRC-32C of every page, verified by every read", "is not there")}};
  append(table.keys, foreign_keys<Aio>("aio"));
  return table;
}

// ---- activation_checkpointing ----

/// A switch of full recompute has no effect where that is not asked for.
Idle without_full_recompute(bool Training::*field) {
  return idle([field](const Config& c) {
    const bool idle = c.training.*field && c.training.recompute != Recompute::full;
    return idle ? "no effect without \"recompute\": \"full\" in the section training" : "";
  });
}

Table<Training> activation_checkpointing_table() {
  Table<Training> table{
      Auto::is_a_value,
      {boolean("cpu_checkpointing", &Training::cpu_checkpointing)
           .means("what full recompute keeps, the inputs of blocks, lies in host memory",
                  "configures a module that models must call; here `training.recompute` decides",
                  without_full_recompute(&Training::cpu_checkpointing), unless_default),
       boolean("nvme_checkpointing", &Training::nvme_checkpointing)
           .means(
               "the same on NVMe, in the `nvme_path` of `offload_param` or `offload_optimizer`; not together",
               "is not there", without_full_recompute(&Training::nvme_checkpointing), unless_default)}};
  append(table.keys, foreign_keys<Training>("activation_checkpointing"));
  return table;
}

}  // namespace

std::vector<Key<Zero>> offload_keys() {
  return {
      integer("sub_group_size", &Zero::sub_group_size, "1000", 0)
          .then([](Zero& zero, const Value& value) {
            if (zero.sub_group_size > 0) return;
            zero.sub_group_size = Zero().sub_group_size;
            value.note(
                cat("0, a parameter at a time in DeepSpeed, takes the default, ", zero.sub_group_size));
          })
          .means("states on NVMe: elements that the optimizer updates at once, at most; never more than 4 "
                 "million",
                 "0: a parameter at a time; here the default",
                 idle([](const Config& c) { return !uses_nvme(c); },
                      cat(nothing_on_nvme, ", and elsewhere the optimizer works in place"))),
      section("offload_param", &Zero::offload_param, offload_param_table()).with(unless_default),
      section("offload_optimizer", &Zero::offload_optimizer, offload_optimizer_table()).with(unless_default),
      deprecated_switch("cpu_offload", &Zero::offload_optimizer, "offload_optimizer"),
      deprecated_switch("cpu_offload_param", &Zero::offload_param, "offload_param")
          .with(also("cpu_offload_params"))};
}

void check_offload(const Zero& zero, const Given& given, const Value& section) {
  check_side(zero, given, section, of_params, "offload_param", "cpu_offload_param");
  check_side(zero, given, section, of_optimizer, "offload_optimizer", "cpu_offload");
}

std::vector<Key<Config>> tier_keys() {
  return {section("aio", &Config::aio, aio_table())
              .with(Concerns::machine, unless_default,
                    idle([](const Config& c) { return !uses_nvme(c) && !activations_on_nvme(c); },
                         nothing_on_nvme)),
          section("activation_checkpointing", &Config::training, activation_checkpointing_table())
              .with(Concerns::run)};
}

void check_tiers(const Config& config, const Value& file) {
  const Node* section = file.node.find("activation_checkpointing");
  const Node* node = section ? section->find("nvme_checkpointing") : nullptr;
  if (!node || !config.training.nvme_checkpointing) return;
  const Value key{*node, "activation_checkpointing.nvme_checkpointing", file.context};
  if (config.training.cpu_checkpointing)
    key.error("the inputs of blocks lie on NVMe or in the host's memory; drop this or cpu_checkpointing");
  if (activations_on_nvme(config) && config.zero.offload_param.nvme_path.empty() &&
      config.zero.offload_optimizer.nvme_path.empty())
    key.error("needs a directory on the drive: \"nvme_path\" in zero_optimization.offload_param (or ",
              "offload_optimizer)");
}

void note_resident_parameters(const Config& config, const Given& given, Context& context) {
  const auto section = given.find("zero_optimization");
  const Node* param = section == given.end() ? nullptr : section->second->find("offload_param");
  if (on_nvme(config.zero.offload_param) && param && !param->find("max_in_cpu"))
    context.note("zero_optimization.offload_param.max_in_cpu",
                 cat("by default, as DeepSpeed's, the first ",
                     counted(config.zero.offload_param.max_in_cpu, "parameter"),
                     " of each rank stay in host memory; 0 puts all on NVMe"));
}

}  // namespace sherd::config
