#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "data/templates/chat_template.h"
#include "device/device.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/weights.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

using engine::CheckpointReader;

void put(const std::string& label, const std::string& value) {
  std::printf("%-14s %s\n", label.c_str(), value.c_str());
}

nlohmann::ordered_json damaged_one(const fs::path& folder, const std::string& error) {
  return {{"checkpoint", folder.string()}, {"whole", false}, {"error", error}};
}

/// The whole checkpoints in a folder, the oldest step first.
std::vector<std::pair<std::int64_t, std::string>> all_tags(
    const fs::path& folder, std::vector<nlohmann::ordered_json>* damaged = nullptr) {
  std::vector<std::pair<std::int64_t, std::string>> out;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code absent;
    const std::string tag = at->path().filename().string();
    if (!fs::exists(at->path() / "manifest.json", absent) || tag.ends_with(".partial") ||
        tag.ends_with(".removed"))
      continue;
    try {
      out.emplace_back(CheckpointReader(at->path()).manifest().global_steps, tag);
    } catch (const Error& fault) {
      if (damaged)
        damaged->push_back(damaged_one(folder / tag, fault.what()));
      else
        log_warning(tag, ": ", fault.what());
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::string saved_layout(const engine::Manifest& manifest) {
  std::string out = counted(manifest.world_size, "rank");
  for (const auto& [axis, size] : manifest.grid)
    if (size > 1) out += cat(", ", axis, " ", size);
  return out;
}

std::int64_t elements_of(const engine::Manifest& manifest) {
  std::int64_t elements = 0;
  for (const auto& [name, shape] : manifest.shapes) {
    std::int64_t numel = 1;
    for (const std::int64_t extent : shape) numel *= extent;
    elements += numel;
  }
  return elements;
}

std::uint64_t bytes_of(const engine::Manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const auto& [name, file] : manifest.files) bytes += file.bytes;
  return bytes;
}

/// How many tensors there are of each kind of state: "exp_avg (fp32)".
std::map<std::string, std::int64_t> kinds_in(const CheckpointReader& reader) {
  std::map<std::string, std::int64_t> kinds;
  for (const engine::CheckpointTensor& tensor : reader.tensors())
    ++kinds[cat(tensor.kind, " (", name_of(tensor.dtype), ")")];
  return kinds;
}

nlohmann::ordered_json json_of(const CheckpointReader& reader, bool parameters) {
  const engine::Manifest& manifest = reader.manifest();
  nlohmann::ordered_json out{{"checkpoint", reader.folder().string()},
                             {"step", manifest.global_steps},
                             {"samples", manifest.global_samples},
                             {"skipped_steps", manifest.skipped_steps},
                             {"ranks", manifest.world_size},
                             {"layout", manifest.grid},
                             {"format", engine::checkpoint_format},
                             {"save_id", manifest.save_id},
                             {"tensors", manifest.shapes.size()},
                             {"elements", elements_of(manifest)},
                             {"compute_dtype", manifest.compute_dtype},
                             {"states", kinds_in(reader)},
                             {"bytes", bytes_of(manifest)},
                             {"files", manifest.files.size()},
                             {"tokenizer", manifest.data.tokenizer},
                             {"vocab_size", manifest.data.vocab_size},
                             {"client", manifest.client}};
  if (manifest.data.position) out["position"] = *manifest.data.position;
  if (manifest.base) out["base"] = manifest.base->folder;
  if (parameters) out["parameters"] = manifest.shapes;
  return out;
}

void inspect(const CheckpointReader& reader, const fs::path& given) {
  const engine::Manifest& manifest = reader.manifest();
  put("checkpoint", reader.folder().string());
  if (reader.folder() != given) {
    std::string tags;
    for (const auto& [step, name] : all_tags(given))
      if (name != reader.folder().filename()) tags += (tags.empty() ? "" : ", ") + name;
    if (!tags.empty()) put("others there", tags);
  }
  put("step", cat(manifest.global_steps, ", ", manifest.global_samples, " samples, ", manifest.skipped_steps,
                  " skipped"));
  put("saved by", saved_layout(manifest));
  put("format", cat(engine::checkpoint_format, ", act of saving ", manifest.save_id));
  put("parameters", cat(manifest.shapes.size(), " tensors, ", elements_of(manifest),
                        " elements, computed in ", manifest.compute_dtype));
  std::string states;
  for (const auto& [kind, count] : kinds_in(reader))
    states += cat(states.empty() ? "" : ", ", kind, " of ", count);
  put("holds", states);
  put("on disk", cat(engine::human_bytes(bytes_of(manifest)), " in ",
                     counted(static_cast<std::int64_t>(manifest.files.size()), "file")));
  if (!manifest.data.tokenizer.empty())
    put("tokenizer", cat(manifest.data.tokenizer, ", ", manifest.data.vocab_size, " ids"));
  if (!manifest.data.chat_template.empty())
    put("conversations", "written by " + data::name_of_spec(manifest.data.chat_template));
  if (manifest.data.position) put("data", cat("at sample ", *manifest.data.position));
  if (manifest.base)
    put("base", cat("in ", manifest.base->folder, ", ",
                    counted(static_cast<std::int64_t>(manifest.base->files.size()), "file")));
  for (const auto& [key, value] : manifest.client) put("client", cat(key, " = ", excerpt(value, 60)));
}

void list_parameters(const CheckpointReader& reader) {
  for (const auto& [name, shape] : reader.manifest().shapes)
    std::printf("%s %s\n", name.c_str(), tensor::Shape{std::span<const std::int64_t>(shape)}.str().c_str());
}

/// Compares every file with the manifest, and looks for every element of every state. Returns what to tell.
nlohmann::ordered_json verify(const CheckpointReader& reader) {
  reader.verify_all();
  for (const engine::CheckpointTensor& t : reader.tensors()) {
    const auto shape = reader.manifest().shapes.find(t.parameter);
    if (shape == reader.manifest().shapes.end())
      fail(ErrorKind::data, reader.folder().string(), " holds ", t.kind, " of '", t.parameter,
           "', which its manifest does not name");
    const auto whole = tensor::Slice::whole(tensor::Shape{std::span<const std::int64_t>(shape->second)});
    reader.require_state(t.kind, t.parameter, whole, 0, whole.numel(), t.dtype, t.format);
  }
  for (const auto& [name, shape] : reader.manifest().shapes)
    if (!reader.holds("fp32", name) && !reader.holds("frozen", name))
      fail(ErrorKind::data, reader.folder().string(), " holds no weights of '", name, "'");
  return {{"checkpoint", reader.folder().string()},
          {"whole", true},
          {"files", reader.manifest().files.size()},
          {"bytes", bytes_of(reader.manifest())},
          {"parameters", reader.manifest().shapes.size()}};
}

void print_verified(const nlohmann::ordered_json& one) {
  const auto folder = one["checkpoint"].get<std::string>();
  if (one["whole"] == true)
    print_text(cat(folder, ": whole; ", one["files"].get<std::size_t>(), " files, ",
                   engine::human_bytes(one["bytes"].get<std::uint64_t>()), ", ",
                   one["parameters"].get<std::size_t>(), " parameters\n"));
  else
    print_text(cat(folder, ": DAMAGED: ", one["error"].get<std::string>(), "\n"));
}

void verify_all(const fs::path& folder, bool json) {
  std::vector<nlohmann::ordered_json> all;
  const auto tags = all_tags(folder, &all);
  std::size_t damaged = all.size();
  const auto tell = [&](nlohmann::ordered_json one) {
    if (!json) print_verified(one);
    damaged += one["whole"] == false;
    all.push_back(std::move(one));
  };
  if (!json) std::for_each(all.begin(), all.end(), print_verified);
  if (tags.empty() && all.empty()) tell(verify(CheckpointReader(engine::checkpoint_folder(folder))));
  for (const auto& [step, tag] : tags) try {
      tell(verify(CheckpointReader(folder / tag)));
    } catch (const Error& error) {
      tell(damaged_one(folder / tag, error.what()));
    }
  if (json) print_json(nlohmann::ordered_json{{"checkpoints", all}});
  if (damaged > 0)
    fail(ErrorKind::data, counted(static_cast<std::int64_t>(damaged), "checkpoint"), " of ", all.size(),
         " in ", folder.string(), damaged > 1 ? " are damaged" : " is damaged");
}

}  // namespace

CommandLine checkpoint_line() {
  CommandLine line("checkpoint",
                   "Looks at a checkpoint, verifies it, or writes it again for another number of ranks.",
                   "inspect|verify|convert CKPT [--tag TAG] [--parameters] [--all] [--output D [--ranks N] "
                   "[--weights-only]] [--json]");
  line.list("what", "inspect|verify|convert CKPT",
            "what to do, and a run's save_dir or one checkpoint's folder")
      .value("tag", "TAG", "this checkpoint of the folder instead of its latest")
      .flag("parameters", "inspect: list parameters and shapes too")
      .flag("all", "verify: every checkpoint in the folder")
      .value("output", "D", "convert: folder of checkpoints to write to, under the same tag")
      .value("ranks", "N", "convert: as if so many ranks had saved, a file each", "1")
      .flag("weights-only", "convert: without states of the optimizer; for training.init_from and generate")
      .json()
      .rest_to("what");
  return line;
}

void checkpoint_command(const CommandLine& line) {
  const std::vector<std::string> words = line.all("what");
  const std::vector<std::string> actions = {"inspect", "verify", "convert"};
  if (words.empty() || std::find(actions.begin(), actions.end(), words[0]) == actions.end())
    throw UsageError(cat("what to do with the checkpoint is not known; ",
                         suggest(words.empty() ? "" : words[0], actions), " See 'sherd checkpoint --help'"));
  if (words.size() != 2) throw UsageError("name one checkpoint. See 'sherd checkpoint --help'");
  const fs::path folder = words[1];
  const bool json = line.has("json");
  if (words[0] == "verify" && line.has("all")) return verify_all(folder, json);
  const CheckpointReader reader(engine::checkpoint_folder(folder, line.text("tag")));
  if (words[0] == "verify") {
    const nlohmann::ordered_json found = verify(reader);
    return json ? print_json(found) : print_verified(found);
  }
  if (words[0] == "inspect") {
    if (json) return print_json(json_of(reader, line.has("parameters")));
    inspect(reader, folder);
    if (line.has("parameters")) list_parameters(reader);
    return;
  }
  reader.verify_all();
  const std::string tag = reader.folder().filename().string(), output = line.required("output");
  std::error_code absent;
  if (fs::equivalent(fs::path(output) / tag, reader.folder(), absent))
    fail(ErrorKind::usage, "--output names the checkpoint itself: give another folder");
  const auto cut = reader.manifest().grid.find("tensor");
  const std::vector<engine::CheckpointTensor> tensors = reader.tensors();
  if (cut != reader.manifest().grid.end() && cut->second > 1 &&
      std::any_of(tensors.begin(), tensors.end(),
                  [](const auto& t) { return t.format != StoredFormat::compute; }))
    log_warning(cut->second,
                " tensor ranks saved weights in few bits: where their columns are no multiple of a block, "
                "blocks are made "
                "anew, and values may move by a step of their codes");
  const auto device = device::make_cpu_device(1);
  engine::copy_checkpoint(reader, output, tag, static_cast<int>(line.integer("ranks", 1, 4096)),
                          line.has("weights-only"), *device);
  if (json) print_json(nlohmann::ordered_json{{"checkpoint", (fs::path(output) / tag).string()}});
  log_info("converted ", reader.folder().string(), ": ", (fs::path(output) / tag).string());
}

}  // namespace sherd::cli
