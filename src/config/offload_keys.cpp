#include <algorithm>

#include "base/excerpt.h"
#include "config/tables.h"

namespace sherd::config {
namespace {

const std::vector<std::string> devices = {"none", "cpu", "nvme"};
constexpr const char* nothing_on_nvme = "no effect: no state lives on NVMe";

bool uses_nvme(const Zero& zero) {
  return zero.offload_param.device == OffloadDevice::nvme ||
         zero.offload_optimizer.device == OffloadDevice::nvme;
}

bool activations_on_nvme(const Config& config) {
  return config.training.nvme_checkpointing && config.training.recompute == Recompute::full;
}

// ---- offload_param, offload_optimizer ----

std::vector<Key<Offload>> common_offload_keys() {
  std::vector<Key<Offload>> keys;
  keys.push_back(choice("device", &Offload::device, devices, "\"cpu\"",
                        {{"disk", "nvme"},
                         {"ssd", "nvme"},
                         {"host", "cpu"},
                         {"ram", "cpu"},
                         {"memory", "cpu"},
                         {"gpu", "none"},
                         {"cuda", "none"}}));
  keys.push_back(text("nvme_path", &Offload::nvme_path, "\"/mnt/nvme\""));
  keys.push_back(
      integer("buffer_count", &Offload::buffer_count, "7", 0, std::numeric_limits<std::int32_t>::max()));
  keys.push_back(boolean("pin_memory", &Offload::pin_memory));
  return keys;
}

std::vector<Text> common_offload_texts() {
  return {derived("nvme_path", "none; required for nvme",
                  "folder on the drive that holds the scratch file; of an absolute path only the last folder "
                  "is made"),
          {"pin_memory", "page-locked host memory, which GPUs reach faster", "0.16: false by default"}};
}

Table<Offload> offload_param_table() {
  Table<Offload> table{Auto::to_default, common_offload_keys()};
  table.keys.push_back(integer("buffer_size", &Offload::buffer_size, "1000", 0));
  table.keys.push_back(integer("max_in_cpu", &Offload::max_in_cpu, "1000", 0));
  describe(table.keys, common_offload_texts());
  describe(
      table.keys,
      {{"device", "tier of the parameters, stage 3 only: device memory, host memory or NVMe"},
       {"buffer_count", "nvme: staging buffers in host memory, each for one block that is read ahead"},
       {"buffer_size",
        "nvme: elements of a staging buffer, at least those of the largest block; checked at "
        "the start"},
       {"max_in_cpu", "nvme: parameters per rank that stay in host memory all the same; 0: all on NVMe"}});
  return table;
}

Table<Offload> offload_optimizer_table() {
  Table<Offload> table{Auto::to_default, common_offload_keys()};
  std::vector<Key<Offload>>& keys = table.keys;
  keys.push_back(boolean("pipeline_read", &Offload::pipeline_read));
  keys.push_back(boolean("pipeline_write", &Offload::pipeline_write));
  keys.push_back(real("ratio", &Offload::ratio, "0.5", 0, 1));
  keys.push_back(
      noted<Offload>("fast_init", Holds::boolean, "states are always written straight to where they live"));
  keys.push_back(refused<Offload>("super_offload", "true",
                                  "SuperOffload is not in this build; ratio leaves a share on the device",
                                  is_false));
  keys.push_back(noted<Offload>("cpuadam_cores_perc", Holds::real, "SuperOffload is off"));
  describe(keys, common_offload_texts());
  describe(
      keys,
      {{"device",
        "tier of the optimizer's states, stages 1 to 3; at 2 and 3 gradients then lie in host memory",
        "nvme at stage 3 only"},
       {"buffer_count",
        "staging buffers in host memory, each for a chunk of parameters with all their states",
        "counts tensors: four per chunk with Adam"},
       {"pipeline_read", "nvme: read the next chunks while one is updated", "false by default"},
       {"pipeline_write", "nvme: write the last chunks while one is updated", "false by default"},
       {"ratio", "share of the states to offload; below 1 at stage 3 only", "needs its own CPU Adam below 1"},
       {"fast_init", "make fp32 masters on NVMe through page-locked buffers"},
       {"super_offload", "SuperOffload: split the update between GPU and CPU"},
       {"cpuadam_cores_perc", "SuperOffload: share of the cores that update"}});
  return table;
}

// DeepSpeed's switches from before the two sections.
Key<Zero> deprecated_switch(std::string name, Offload Zero::*field, const std::string& section) {
  return custom<Zero>(std::move(name), "true",
                      [=](Zero& zero, const Value& value) {
                        const bool on = value.boolean();
                        if (on) (zero.*field).device = OffloadDevice::cpu;
                        value.note(cat("deprecated; write \"", section, R"(": {"device": ")",
                                       on ? "cpu" : "none", "\"}"));
                      })
      .takes("true or false");
}

// One of the two sections, with what the checks need to speak of it.
struct Side {
  std::string name, deprecated;  // keys of zero_optimization
  const Offload& offload;
  Table<Offload> table;
};

std::vector<Side> sides_of(const Zero& zero) {
  return {{"offload_param", "cpu_offload_param", zero.offload_param, offload_param_table()},
          {"offload_optimizer", "cpu_offload", zero.offload_optimizer, offload_optimizer_table()}};
}

void require_one(const Value& side, const char* name, std::int64_t count, const char* whose = "device") {
  const Node* node = side.node.find(name);
  if (count < 1)
    Value{node ? *node : side.node, join(side.path, name), side.context}.error(
        "must be at least 1 with ", whose, " \"nvme\", not ", count);
}

void check_side(const Zero& zero, const Given& given, const Value& section, const Side& side) {
  const Offload& offload = side.offload;
  const bool old = given.contains(side.deprecated), current = given.contains(side.name);
  const auto key = [&](const std::string& name) {
    return Value{*given.at(name), join(section.path, name), section.context};
  };
  if (old && current)
    key(side.deprecated)
        .error("means \"", side.name, "\" with device \"cpu\", and that section is given too; remove one of ",
               "the two");
  // The update stages parameters on NVMe through the same buffers.
  if (&offload == &zero.offload_optimizer && current && zero.offload_param.device == OffloadDevice::nvme)
    require_one(key(side.name), "buffer_count", offload.buffer_count, "offload_param's device");
  if (offload.device == OffloadDevice::none) return;
  const Value here = key(old ? side.deprecated : side.name);
  const std::string& device = devices[static_cast<std::size_t>(offload.device)];
  // Parameters that no stage shards were left where they are by now (zero_keys.cpp).
  if (zero.stage < 1)
    here.error("device \"", device,
               "\" needs stage 1, 2 or 3, which shard the optimizer's states, not stage ", zero.stage,
               "; set zero_optimization.stage to 1, or the device to \"none\"");
  const auto inner = [&](const char* name) {
    const Node* node = here.node.find(name);
    return Value{node ? *node : here.node, join(here.path, name), section.context};
  };
  if (offload.ratio < 1 && zero.stage < 3)
    inner("ratio").error(offload.ratio, " needs stage 3, not stage ", zero.stage,
                         "; set zero_optimization.stage to 3, or ratio to 1");
  if (offload.device != OffloadDevice::nvme) return;
  if (offload.nvme_path.empty())
    here.error("device \"nvme\" needs \"nvme_path\", a directory on the drive that is to hold the states");
  require_one(here, "buffer_count", offload.buffer_count);
  require_one(here, "buffer_size", offload.buffer_size);
}

std::string no_effect_with(OffloadDevice device) {
  return cat("no effect with device \"", devices[static_cast<std::size_t>(device)], "\"");
}

// Why `key` of a section cannot matter; empty when it does, or has said so itself.
std::string why_idle(const Zero& zero, const Offload& offload, const std::string& key) {
  if (key == "nvme_path") return {};  // note_idle_tiers() knows
  const bool with_nvme = key == "buffer_size" || key == "max_in_cpu";
  const bool of_update = key == "pipeline_read" || key == "pipeline_write" ||
                         (key == "buffer_count" && &offload == &zero.offload_optimizer);
  if (of_update) return uses_nvme(zero) ? "" : nothing_on_nvme;
  if (offload.device == OffloadDevice::none ||
      (offload.device == OffloadDevice::cpu && (with_nvme || key == "buffer_count")))
    return no_effect_with(offload.device);
  if (key == "pin_memory") return "cannot matter on a CPU device";
  return {};
}

// ---- aio ----

Table<Aio> aio_table() {
  static constexpr std::int64_t page = 4096, most = std::int64_t{1} << 30;
  Table<Aio> table;
  std::vector<Key<Aio>>& keys = table.keys;
  keys.push_back(custom<Aio>("block_size", "65536", [](Aio& aio, const Value& value) {
                   aio.block_size = value.integer(page, most);
                   if (aio.block_size % page != 0)
                     value.error("must be a multiple of ", page, " bytes, not ", value.node.brief(),
                                 "; the next one is ", (aio.block_size / page + 1) * page);
                 }).takes(integers(page, most) + ", a multiple of 4096"));
  keys.push_back(integer("queue_depth", &Aio::queue_depth, "32", 1, 4096));
  keys.push_back(integer("thread_count", &Aio::thread_count, "4", 1, 256).alias("intra_op_parallelism"));
  keys.push_back(boolean("single_submit", &Aio::single_submit));
  keys.push_back(boolean("overlap_events", &Aio::overlap_events));
  keys.push_back(refused<Aio>(
      "use_gds", "true",
      "it needs CUDA's GPUDirect Storage, which is not in this build; transfers pass through host memory",
      is_false));
  keys.push_back(choice("backend", &Aio::backend, {"auto", "io_uring", "threads"}, "\"threads\""));
  keys.push_back(boolean("checksums", &Aio::checksums));
  describe(keys,
           {{"block_size", "bytes of one request"},
            {"queue_depth", "requests under way"},
            {"thread_count", "threads: how many there are",
             "0.19 reads `intra_op_parallelism` alone, and not the old "
             "name"},
            {"single_submit", "io_uring: hand requests to the kernel one by one"},
            {"overlap_events", "start requests while others are under way"},
            {"use_gds", "GPUDirect Storage"},
            {"backend",
             "what moves the bytes: io_uring or an error, threads with positional calls, auto: io_uring "
             "where kernel and file system allow it",
             "is not there: always libaio"},
            {"checksums", "CRC-32C of every page, verified by every read", "is not there"}});
  return table;
}

void note_idle_aio(const Config& config, const Node& section, Context& context) {
  if (!uses_nvme(config.zero) && !activations_on_nvme(config)) return context.note("aio", nothing_on_nvme);
  const auto idle_with = [&](Aio::Backend backend, const char* name, const char* key) {
    const Node* node = section.find(key);
    if (config.aio.backend == backend && node && !node->is(Node::Kind::null))
      context.note(cat("aio.", key), cat("no effect with backend \"", name, "\""));
  };
  idle_with(Aio::Backend::io_uring, "io_uring", "thread_count");
  idle_with(Aio::Backend::io_uring, "io_uring", "intra_op_parallelism");
  idle_with(Aio::Backend::threads, "threads", "single_submit");
}

// ---- activation_checkpointing ----

Table<Training> activation_checkpointing_table() {
  const char* reason = "training.recompute chooses what is recomputed, and Sherd how";
  Table<Training> table;
  for (const char* name : {"partition_activations", "contiguous_memory_optimization",
                           "synchronize_checkpoint_boundary", "profile"})
    table.keys.push_back(noted<Training>(name, Holds::boolean, reason));
  table.keys.push_back(noted<Training>("number_checkpoints", Holds::count, reason));
  table.keys.push_back(boolean("cpu_checkpointing", &Training::cpu_checkpointing));
  table.keys.push_back(boolean("nvme_checkpointing", &Training::nvme_checkpointing));
  describe(table.keys,
           {{"partition_activations", "cut kept activations over model-parallel ranks"},
            {"contiguous_memory_optimization", "copy kept activations into one buffer"},
            {"synchronize_checkpoint_boundary", "synchronize the device at every block"},
            {"profile", "time every block"},
            {"number_checkpoints", "how many blocks are kept"},
            {"cpu_checkpointing", "what full recompute keeps, the inputs of blocks, lies in host memory",
             "configures a module that models must call; here `training.recompute` decides"},
            {"nvme_checkpointing",
             "the same on NVMe, in the `nvme_path` of `offload_param` or `offload_optimizer`; "
             "not together",
             "is not there"}});
  return table;
}

}  // namespace

std::vector<Key<Zero>> offload_keys() {
  std::vector<Key<Zero>> keys;
  keys.push_back(custom<Zero>("sub_group_size", "1000", [](Zero& zero, const Value& value) {
                   const std::int64_t size = value.integer(0);
                   if (size == 0)
                     return value.note(cat("0, a parameter at a time in DeepSpeed, takes the default, ",
                                           zero.sub_group_size));
                   zero.sub_group_size = size;
                 }).takes(integers(0)));
  keys.push_back(section("offload_param", &Zero::offload_param, offload_param_table()));
  keys.push_back(section("offload_optimizer", &Zero::offload_optimizer, offload_optimizer_table()));
  keys.push_back(deprecated_switch("cpu_offload", &Zero::offload_optimizer, "offload_optimizer"));
  keys.push_back(deprecated_switch("cpu_offload_param", &Zero::offload_param, "offload_param")
                     .alias("cpu_offload_params"));
  keys.push_back(noted<Zero>("cpu_offload_use_pin_memory", Holds::boolean,
                             "deprecated; give pin_memory in offload_param or offload_optimizer"));
  return keys;
}

void check_offload(const Zero& zero, const Given& given, const Value& section) {
  for (const Side& side : sides_of(zero)) {
    check_side(zero, given, section, side);
    const auto found = given.find(side.name);
    if (found == given.end()) continue;
    for (const auto& [name, node] : found->second->members) {
      const auto key = std::find_if(side.table.keys.begin(), side.table.keys.end(),
                                    [&](const Key<Offload>& candidate) { return candidate.name == name; });
      if (node.is(Node::Kind::null) || node.is_text("auto") || name == "device" ||
          key->effect != Effect::effective)
        continue;
      if (const std::string why = why_idle(zero, side.offload, name); !why.empty())
        section.context.note(cat(section.path, ".", side.name, ".", name), why);
    }
  }
  if (given.contains("sub_group_size") && !uses_nvme(zero))
    section.context.note(join(section.path, "sub_group_size"),
                         cat(nothing_on_nvme, ", and elsewhere the optimizer works in place"));
}

std::vector<Key<Config>> tier_keys() {
  std::vector<Key<Config>> keys;
  keys.push_back(section("aio", &Config::aio, aio_table()));
  keys.push_back(section("activation_checkpointing", &Config::training, activation_checkpointing_table()));
  return keys;
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

void note_idle_tiers(const Config& config, const Given& given, Context& context) {
  if (given.contains("aio")) note_idle_aio(config, *given.at("aio"), context);
  const auto section = given.find("zero_optimization");
  for (const Side& side : sides_of(config.zero)) {
    const Node* offload = section == given.end() ? nullptr : section->second->find(side.name);
    const bool here = offload && offload->is(Node::Kind::object) && !side.offload.nvme_path.empty();
    if (here && side.offload.device != OffloadDevice::nvme && !activations_on_nvme(config))
      context.note(cat("zero_optimization.", side.name, ".nvme_path"), no_effect_with(side.offload.device));
  }
  const Node* param = section == given.end() ? nullptr : section->second->find("offload_param");
  if (config.zero.offload_param.device == OffloadDevice::nvme && param && !param->find("max_in_cpu"))
    context.note("zero_optimization.offload_param.max_in_cpu",
                 cat("by default, as DeepSpeed's, the first ",
                     counted(config.zero.offload_param.max_in_cpu, "parameter"),
                     " of each rank stay in host memory; 0 puts all on NVMe"));
  const bool full = config.training.recompute == Recompute::full;
  const bool activations = config.training.cpu_checkpointing && full;
  for (const auto& [key, on] : {std::pair{"cpu_checkpointing", config.training.cpu_checkpointing},
                                std::pair{"nvme_checkpointing", config.training.nvme_checkpointing}})
    if (on && !full)
      context.note(join("activation_checkpointing", key),
                   "no effect without \"recompute\": \"full\" in the section training");
  const bool states = config.zero.offload_param.device != OffloadDevice::none ||
                      config.zero.offload_optimizer.device != OffloadDevice::none;
  if (config.device.host_memory_limit > 0 && !states && !activations)
    context.note("device.host_memory_limit", "no effect: nothing is offloaded");
}

}  // namespace sherd::config
