#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/checkpoint.h"

namespace sherd::engine {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* format_name = "sherd-checkpoint-1";

std::string read_text(const std::filesystem::path& path, const char* next_step) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(ErrorKind::io, "cannot read ", path.string(), ": ", next_step);
  std::ostringstream text;
  text << in.rdbuf();
  return std::move(text).str();
}

}  // namespace

std::string Manifest::to_json() const {
  Json json;
  json["format"] = format_name;
  json["world_size"] = world_size;
  json["compute_dtype"] = compute_dtype;
  json["micro_steps"] = micro_steps;
  json["global_steps"] = global_steps;
  json["global_samples"] = global_samples;
  json["skipped_steps"] = skipped_steps;
  json["optimizer_steps"] = optimizer_steps;
  if (lr) json["lr"] = *lr;
  json["scheduler"] = scheduler;
  json["loss_scaler"] = loss_scaler;
  json["client"] = Json::object();
  for (const auto& [key, value] : client) json["client"][key] = value;
  json["data"] = Json::parse(data.to_json());
  json["config"] = config;
  json["shapes"] = Json::object();
  for (const auto& [name, shape] : shapes) json["shapes"][name] = shape;
  json["files"] = Json::object();
  for (const auto& [name, sum] : files) json["files"][name] = {{"bytes", sum.bytes}, {"crc32c", sum.crc32c}};
  return json.dump(1) + "\n";
}

Manifest Manifest::from_json(const std::string& text, const std::filesystem::path& path) {
  try {
    const Json json = Json::parse(text);
    if (json.at("format") != format_name)
      fail(ErrorKind::data, path.string(), " is of format ", json.at("format").dump(), ", this build reads ", format_name);
    Manifest out;
    out.world_size = json.at("world_size");
    out.compute_dtype = json.at("compute_dtype");
    out.micro_steps = json.at("micro_steps");
    out.global_steps = json.at("global_steps");
    out.global_samples = json.at("global_samples");
    out.skipped_steps = json.at("skipped_steps");
    out.optimizer_steps = json.at("optimizer_steps");
    if (json.contains("lr")) out.lr = json.at("lr").get<double>();
    out.scheduler = json.at("scheduler");
    out.loss_scaler = json.at("loss_scaler");
    out.config = json.at("config");
    for (const auto& [key, value] : json.at("client").items()) out.client[key] = value.get<std::string>();
    out.data = json.contains("data") ? DataRecord::from_json(json.at("data").dump(), path.string())
                                     : DataRecord::from_client(out.client, path.string());
    for (const auto& [key, value] : json.at("shapes").items())
      out.shapes[key] = value.get<std::vector<std::int64_t>>();
    for (const auto& [key, value] : json.at("files").items())
      out.files[key] = {value.at("bytes").get<std::uint64_t>(), value.at("crc32c").get<std::uint32_t>()};
    return out;
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::data, path.string(), " is not a checkpoint's manifest (", error.what(),
         "): resume from another checkpoint with --set training or by naming its tag");
  }
}

std::filesystem::path checkpoint_folder(const std::filesystem::path& directory, const std::string& tag) {
  if (std::filesystem::exists(directory / "manifest.json")) return directory;  // a tag's own folder was named
  std::string name = tag;
  if (name.empty()) {
    name = read_text(directory / "latest", "no checkpoint was completed in this folder; check the path");
    while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  }
  if (!std::filesystem::exists(directory / name / "manifest.json"))
    fail(ErrorKind::io, "there is no whole checkpoint '", name, "' in ", directory.string(), ": look at what is there with `ls`");
  return directory / name;
}

CheckpointReader::CheckpointReader(std::filesystem::path folder) : folder_(std::move(folder)) {
  const auto path = folder_ / "manifest.json";
  manifest_ = Manifest::from_json(read_text(path, "is this a checkpoint's folder?"), path);
  for (const auto& [name, checksum] : manifest_.files) {
    if (!name.ends_with(".safetensors")) continue;
    files_.emplace_back(folder_ / name);
    const SafetensorsFile& file = files_.back();
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto begin = file.metadata().find(entry.name);
      if (begin == file.metadata().end())
        fail(ErrorKind::data, (folder_ / name).string(), " does not say where tensor '", entry.name, "' begins");
      parts_[entry.name].push_back({files_.size() - 1, std::stoll(begin->second), entry.numel()});
    }
  }
  for (auto& [name, parts] : parts_)
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
}

void CheckpointReader::verify(const std::string& file) const {
  const FileChecksum wanted = manifest_.files.at(file), found = checksum_file(folder_ / file);
  if (found == wanted) return;
  fail(ErrorKind::data, (folder_ / file).string(), " is damaged: ", found.bytes, " bytes with CRC-32C ", found.crc32c,
       " where the manifest has ", wanted.bytes, " and ", wanted.crc32c, "; resume from an earlier checkpoint by naming its tag");
}

bool CheckpointReader::has(const std::string& kind, const std::string& parameter) const {
  return parts_.contains(kind + "." + parameter);
}

void CheckpointReader::read(const std::string& kind, const std::string& parameter, std::int64_t begin,
                            const tensor::Tensor& to) const {
  const std::string name = kind + "." + parameter;
  const auto found = parts_.find(name);
  std::int64_t at = begin;
  const std::int64_t end = begin + to.numel();
  if (found != parts_.end()) {
    for (const Part& part : found->second) {
      if (at >= end || part.begin > at) break;
      const std::int64_t stop = std::min(end, part.begin + part.count);
      if (stop <= at) continue;
      files_[part.file].read(name, at - part.begin, to.range(at - begin, stop - begin));
      at = stop;
    }
  }
  if (at < end)
    fail(ErrorKind::data, "checkpoint ", folder_.string(), " lacks elements from ", at, " on of '", name,
         "': it was written by another model or optimizer");
}

}  // namespace sherd::engine
