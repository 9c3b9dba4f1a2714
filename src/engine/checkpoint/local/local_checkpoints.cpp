#include "engine/checkpoint/local/local_checkpoints.h"

#include <unistd.h>

#include <map>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "comm/exchange/topology.h"
#include "comm/gather.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/save_folder.h"

namespace sherd::engine {
namespace fs = std::filesystem;

LocalCheckpoints::LocalCheckpoints(const Distributed& dist, const sharding::ShardedModel& model,
                                   device::Device& device, const fs::path& directory,
                                   const fs::path& save_dir, bool anew)
    : dist_(dist),
      device_(device),
      save_dir_(fs::absolute(save_dir)),
      frozen_(dist, model, device),
      folder_(dist.world(), directory, save_dir, anew) {
  const int machines = folder_.machines().machines();
  if (dist_.rank() == 0 && machines == 1 && dist_.local_size() < dist_.world_size())
    log_warning("training.local_save_dir, '", directory.string(),
                "', is one folder for all machines, so local checkpoints have no copy on another: name one "
                "that each machine has for itself");
}

/// That of the last local checkpoint here; one of nothing where there is none, or none any more.
Manifest LocalCheckpoints::manifest_before() const {
  if (newest_path_.empty()) return {};
  try {
    return Manifest::from_json(read_file(newest_path_ / "manifest.json"), newest_path_);
  } catch (const Error& error) {
    log_warning("a local checkpoint was removed or damaged while the run went on: ", error.what());
    return {};
  }
}

/// Puts links to the copies of frozen files that the last local checkpoint here has; where one lacks, all are
/// to come.
void LocalCheckpoints::link_frozen(const SaveAct& act, PeerCopies::Copying& copying) const {
  copying.frozen = frozen_.sums();
  const Manifest before = manifest_before();
  bool all = true;
  for (const int source : copies_->sources()) {
    const FileChecksum& sum = copying.frozen[static_cast<std::size_t>(source)];
    if (sum.bytes == 0) continue;
    copying.wanted.push_back(source);
    const std::string name = frozen_file(source);
    const auto had = before.files.find(name);
    // The checksum is of the act of saving, too, that wrote the file.
    all = all && had != before.files.end() && had->second == sum &&
          ::link((newest_path_ / name).c_str(), (act.partial / name).c_str()) == 0;
  }
  if (all) copying.wanted.clear();
}

void LocalCheckpoints::begin(SaveAct& act) {
  if (!copies_) copies_ = std::make_shared<PeerCopies>(folder_, dist_.world(), device_);
  const auto saving = saving_ = std::make_shared<Saving>();
  saving->copies = copies_;
  saving->partial = act.partial = folder_.partial(act.tag, act.save_id);
  saving->place = folder_.place(act.tag, act.save_id);
  act.owns_partial = folder_.leads();
  comm::gather_results(dist_.world(), "local checkpoint begun", [&] {
    std::error_code error;
    if (folder_.leads() && !fs::create_directory(act.partial, error))
      fail(ErrorKind::io, "cannot create '", act.partial.string(), "': ", error.message());
    return true;
  });
  frozen_.put(act.partial, act.save_id);
  comm::gather_results(dist_.world(), "copies of frozen parameters", [&] {
    link_frozen(act, saving->copying);
    return true;
  });
  act.write = [saving](SaveAct& writing, const std::function<void()>& go_on) {
    saving->sums = saving->copies->write(writing, saving->copying, go_on);
    saving->act = writing;
    saving->act.write = nullptr;  // which holds `saving`
  };
}

void LocalCheckpoints::publish() {
  comm::Communicator& world = dist_.world();
  Saving& saving = *saving_;
  // The manifest and the small files are rank 0's, which has put them in its folder.
  std::string text;
  std::map<std::string, std::string> small;
  const auto is_small = [](const auto& file) { return !file.first.ends_with(".safetensors"); };
  comm::gather_results(world, "local checkpoint described", [&] {
    if (dist_.rank() != 0) return true;
    text = saving.act.complete(saving.sums, next_ordinal(save_dir_));
    for (const auto& file : saving.act.manifest.files)
      if (is_small(file)) small[file.first] = read_file(saving.partial / file.first);
    return true;
  });
  text = comm::broadcast_text(world, text, 0, "manifest");
  const Manifest manifest = Manifest::from_json(text, saving.partial / "manifest.json");
  for (const auto& file : manifest.files)
    if (is_small(file)) small[file.first] = comm::broadcast_text(world, small[file.first], 0, file.first);
  comm::gather_results(world, "local checkpoint published", [&] {
    if (!folder_.leads()) return true;
    for (const auto& [name, content] : small)
      if (dist_.rank() != 0) write_file_atomically(saving.partial / name, content);
    write_file_atomically(saving.partial / "manifest.json", text);
    publish_folder(saving.partial, saving.place);
    return true;
  });
  keep(saving.place, manifest,
       std::chrono::duration<double>(std::chrono::steady_clock::now() - saving.begun).count());
  saving_.reset();
  folder_.remove_others(newest_path_);
  frozen_.keep(newest_path_);
}

/// The checkpoint there is the newest from here on.
void LocalCheckpoints::keep(const fs::path& place, const Manifest& manifest, double seconds) {
  newest_path_ = place;
  newest_ = {manifest.global_steps, 0, seconds};
  for (const auto& [name, sum] : manifest.files) newest_.bytes += sum.bytes;
}

void LocalCheckpoints::forget_failed() {
  if (saving_ && folder_.leads()) remove_folder(saving_->partial);
  saving_.reset();
  copies_.reset();
}

void LocalCheckpoints::remove() {
  comm::gather_records(dist_.world(), char{}, "local checkpoints removed");
  forget_failed();
  frozen_.forget();
  newest_path_.clear();
  newest_ = {};
  folder_.remove();
}

}  // namespace sherd::engine
