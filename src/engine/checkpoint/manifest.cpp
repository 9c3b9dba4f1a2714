#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/crc32c.h"
#include "base/text/check_json.h"
#include "base/text/excerpt.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/manifest.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"

namespace sherd::engine {
namespace {

using nlohmann::json;

/// Every whole number up to here is a double of its own; no run counts so far.
constexpr std::int64_t most = std::int64_t{1} << 53;
constexpr std::int64_t most_ranks = 1 << 20;

// The checksum covers the bytes of the file before it, and what follows them is known; so no byte can change
// unnoticed.
constexpr std::string_view seal_key = ",\n \"crc32c\": ";

std::string seal(std::string_view body) {
  return cat(seal_key, crc32c(body.data(), body.size()), "\n}\n");
}

void check_seal(std::string_view text) {
  const std::size_t at = text.rfind(seal_key);
  if (at == std::string_view::npos) fail(ErrorKind::data, "its checksum is missing");
  if (text.substr(at) != seal(text.substr(0, at)))
    fail(ErrorKind::data, "its checksum does not match: it was changed or damaged after it was written");
}

const json& manifest_member(const json& object, const std::string& key) {
  const auto found = object.find(key);
  if (found == object.end()) fail(ErrorKind::data, "it has no ", key);
  return *found;
}

std::string text_of(const json& object, const std::string& key) {
  const json& value = manifest_member(object, key);
  if (!value.is_string()) fail(ErrorKind::data, key, " is not a string");
  return value.get<std::string>();
}

const json& object_of(const json& object, const std::string& key) {
  const json& value = manifest_member(object, key);
  if (!value.is_object()) fail(ErrorKind::data, key, " is not an object");
  return value;
}

std::int64_t number_of(const json& value, const std::string& what, std::int64_t least, std::int64_t largest) {
  const bool fits = value.is_number_unsigned() &&
                    value.get<std::uint64_t>() <= static_cast<std::uint64_t>(largest) &&
                    value.get<std::int64_t>() >= least;
  if (!fits)
    fail(ErrorKind::data, what, " is ", value.dump().substr(0, 40), ", not a whole number from ", least,
         " to ", largest);
  return value.get<std::int64_t>();
}

std::int64_t count_of(const json& object, const std::string& key, std::int64_t least, std::int64_t largest) {
  return number_of(manifest_member(object, key), key, least, largest);
}

/// One number where there is one group, else a list.
void read_lr(const json& value, Manifest& out) {
  const json list = value.is_array() ? value : json::array({value});
  for (const json& lr : list) {
    if (value.is_array() && lr.is_null()) {
      out.lr.emplace_back();
      continue;
    }
    if (!lr.is_number() || !std::isfinite(lr.get<double>()) || lr.get<double>() < 0)
      fail(ErrorKind::data, "lr is not a number of at least 0");
    out.lr.emplace_back(lr.get<double>());
  }
}

json to_json_value(const std::vector<std::optional<double>>& lr) {
  json list = json::array();
  for (const auto& rate : lr) list.push_back(rate ? json(*rate) : json());
  return lr.size() == 1 ? list.front() : list;
}

void read_counters(const json& root, Manifest& out) {
  out.world_size = static_cast<int>(count_of(root, "world_size", 1, most_ranks));
  out.micro_steps = count_of(root, "micro_steps", 0, most);
  out.global_steps = count_of(root, "global_steps", 0, out.micro_steps);
  out.global_samples = count_of(root, "global_samples", out.global_steps, most);
  out.skipped_steps = count_of(root, "skipped_steps", 0, out.global_steps);
  out.optimizer_steps = count_of(root, "optimizer_steps", 0, out.global_steps);
  if (root.contains("lr")) read_lr(root["lr"], out);
}

/// Their owners read them once more, into the engine; here they find what is wrong before that changes
/// anything.
void check_states(const Manifest& manifest) {
  if (!manifest.scheduler.empty()) {
    optim::LrSchedule schedule({}, 0, false);
    schedule.restore(manifest.scheduler);
    if (schedule.last_batch_iteration() > most) fail(ErrorKind::data, "scheduler is beyond ", most);
  }
  if (manifest.loss_scaler.empty()) return;
  optim::LossScaler scaler({});
  scaler.restore(manifest.loss_scaler);
  if (scaler.state().iteration > most) fail(ErrorKind::data, "loss_scaler is beyond ", most);
}

void read_shapes(const json& root, Manifest& out) {
  for (const auto& [name, value] : object_of(root, "shapes").items()) {
    const std::string what = cat("the shape of '", name, "'");
    if (!value.is_array()) fail(ErrorKind::data, what, " is not a list");
    std::int64_t elements = 1;
    std::vector<std::int64_t>& shape = out.shapes[name];
    for (const json& extent : value) {
      shape.push_back(number_of(extent, what, 0, most));
      if (__builtin_mul_overflow(elements, std::max<std::int64_t>(shape.back(), 1), &elements) ||
          elements > most)
        fail(ErrorKind::data, what, " has more than ", most, " elements");
    }
  }
}

/// Floats as the doubles that they are.
void read_step_states(const json& root, Manifest& out) {
  if (!root.contains("step_states")) return;
  for (const auto& [path, values] : object_of(root, "step_states").items()) {
    if (!values.is_array()) fail(ErrorKind::data, "the step state of '", path, "' is not a list");
    std::vector<float>& to = out.step_states[path];
    for (const json& value : values) {
      const double wide = value.is_number() ? value.get<double>() : std::nan("");
      if (!(std::abs(wide) <= std::numeric_limits<float>::max()) || static_cast<float>(wide) != wide)
        fail(ErrorKind::data, "the step state of '", path, "' holds ", value.dump().substr(0, 40),
             ", which is no number in fp32");
      to.push_back(static_cast<float>(wide));
    }
  }
}

std::map<std::string, FileChecksum> checksums_of(const json& object) {
  std::map<std::string, FileChecksum> out;
  for (const auto& [name, value] : object_of(object, "files").items()) {
    if (name.empty() || name.starts_with('.') || name.find('/') != std::string::npos)
      fail(ErrorKind::data, "'", name, "' is not the name of a file of its folder");
    if (!value.is_object()) fail(ErrorKind::data, "the entry of file '", name, "' is not an object");
    out[name] = {static_cast<std::uint64_t>(count_of(value, "bytes", 0, INT64_MAX)),
                 static_cast<std::uint32_t>(count_of(value, "crc32c", 0, UINT32_MAX))};
  }
  return out;
}

json to_json_object(const std::map<std::string, FileChecksum>& files) {
  json sums = json::object();  // an ordered one takes quadratic time to fill
  for (const auto& [name, sum] : files) sums[name] = {{"bytes", sum.bytes}, {"crc32c", sum.crc32c}};
  return sums;
}

void read_files(const json& root, Manifest& out) {
  out.files = checksums_of(root);
  if (root.contains("base"))
    out.base = {text_of(object_of(root, "base"), "folder"), checksums_of(root["base"])};
  for (int rank = 0; rank < out.world_size; ++rank)
    if (!out.files.contains(rank_file(rank))) fail(ErrorKind::data, "it names no file of rank ", rank);
  if (out.files.contains(rank_file(out.world_size)) || out.files.contains(frozen_file(out.world_size)))
    fail(ErrorKind::data, "it names files of more than its ", out.world_size, " ranks");
}

void read_data(const json& root, DataRecord& out) {
  const json& data = object_of(root, "data");
  const auto count = [&](const char* key, std::int64_t largest) {
    return data.contains(key) ? number_of(data[key], cat("data.", key), 0, largest) : 0;
  };
  if (data.contains("position")) out.position = count("position", data::LoaderPosition::most);
  out.epoch_samples = count("epoch_samples", data::LoaderPosition::most);
  if (data.contains("tokenizer")) out.tokenizer = text_of(data, "tokenizer");
  if (data.contains("chat_template")) out.chat_template = text_of(data, "chat_template");
  out.vocab_size = count("vocab_size", most);
  out.tokens = count("tokens", most);
  out.sequences = count("sequences", most);
  out.fingerprint = static_cast<std::uint32_t>(count("fingerprint", UINT32_MAX));
}

Manifest parse(const std::string& text) {
  check_json(text);
  const json root = json::parse(text);
  if (!root.is_object()) fail(ErrorKind::data, "it is not an object");
  const std::string format = text_of(root, "format");
  if (format != checkpoint_format)
    fail(ErrorKind::data, "it is of format '", excerpt(format, 40), "', and this build reads ",
         checkpoint_format, " alone");
  check_seal(text);
  Manifest out;
  out.save_id = text_of(root, "save");
  if (root.contains("ordinal")) out.ordinal = count_of(root, "ordinal", 1, most);
  if (root.contains("frozen")) out.frozen_id = text_of(root, "frozen");
  out.compute_dtype = text_of(root, "compute_dtype");
  out.scheduler = text_of(root, "scheduler");
  out.loss_scaler = text_of(root, "loss_scaler");
  out.config = text_of(root, "config");
  read_counters(root, out);
  check_states(out);
  const json& client = object_of(root, "client");
  for (const auto& [key, value] : client.items()) out.client[key] = text_of(client, key);
  read_data(root, out.data);
  read_step_states(root, out);
  read_shapes(root, out);
  read_files(root, out);
  for (const auto& [axis, size] : object_of(root, "grid").items())
    out.grid[axis] = number_of(size, cat("grid.", axis), 1, most_ranks);
  return out;
}

nlohmann::ordered_json to_json_object(const DataRecord& data) {
  auto out = nlohmann::ordered_json::object();
  if (data.position) out["position"] = *data.position;
  if (data.epoch_samples > 0) out["epoch_samples"] = data.epoch_samples;
  if (!data.tokenizer.empty()) out["tokenizer"] = data.tokenizer;
  if (!data.chat_template.empty()) out["chat_template"] = data.chat_template;
  if (data.vocab_size > 0) out["vocab_size"] = data.vocab_size;
  if (data.tokens > 0)
    out["tokens"] = data.tokens, out["sequences"] = data.sequences, out["fingerprint"] = data.fingerprint;
  return out;
}

}  // namespace

std::string Manifest::to_json() const {
  nlohmann::ordered_json root;
  root["format"] = checkpoint_format;
  if (ordinal > 0) root["ordinal"] = ordinal;  // early: SaveFolder reads the first bytes alone
  root["save"] = save_id;
  if (!frozen_id.empty()) root["frozen"] = frozen_id;
  root["world_size"] = world_size;
  root["grid"] = grid;
  root["compute_dtype"] = compute_dtype;
  root["micro_steps"] = micro_steps;
  root["global_steps"] = global_steps;
  root["global_samples"] = global_samples;
  root["skipped_steps"] = skipped_steps;
  root["optimizer_steps"] = optimizer_steps;
  if (!lr.empty()) root["lr"] = to_json_value(lr);
  root["scheduler"] = scheduler;
  root["loss_scaler"] = loss_scaler;
  root["client"] = client;
  root["data"] = to_json_object(data);
  root["config"] = config;
  if (!step_states.empty()) {
    json states = json::object();
    for (const auto& [path, values] : step_states)
      states[path] = std::vector<double>(values.begin(), values.end());
    root["step_states"] = states;
  }
  root["shapes"] = shapes;
  root["files"] = to_json_object(files);
  if (base) root["base"] = {{"folder", base->folder}, {"files", to_json_object(base->files)}};
  std::string body;
  try {
    body = root.dump(1);
  } catch (const json::exception&) {
    fail(ErrorKind::usage,
         "a checkpoint's manifest takes UTF-8 only: a string of the caller's, or a name of the ",
         "configuration or the model, has other bytes");
  }
  body.resize(body.size() - std::string_view("\n}").size());
  return body + seal(body);
}

Manifest Manifest::from_json(const std::string& text, const std::filesystem::path& path) {
  try {
    return parse(text);
  } catch (const Error& error) {
    fail(ErrorKind::data, "'", path.string(),
         "' is not a manifest of a whole checkpoint: ", excerpt(error.what(), 400),
         "; resume from another checkpoint by naming its tag");
  }
}

}  // namespace sherd::engine
