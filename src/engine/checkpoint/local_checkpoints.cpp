#include "engine/checkpoint/local_checkpoints.h"

#include <unistd.h>

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

/// Puts links to the copies of frozen files that the last local checkpoint here has; where one lacks, all are
/// to come.
void LocalCheckpoints::link_frozen(const SaveAct& act, PeerCopies::Copying& copying) const {
  copying.frozen = frozen_.sums();
  Manifest before;
  if (!newest_.empty()) before = Manifest::from_json(read_file(newest_ / "manifest.json"), newest_);
  bool all = true;
  for (const int source : copies_->sources()) {
    const FileChecksum& sum = copying.frozen[static_cast<std::size_t>(source)];
    if (sum.bytes == 0) continue;
    copying.wanted.push_back(source);
    const std::string name = frozen_file(source);
    const auto had = before.files.find(name);
    all = all && before.frozen_id == frozen_.id() && had != before.files.end() && had->second == sum &&
          ::link((newest_ / name).c_str(), (act.partial / name).c_str()) == 0;
  }
  if (all) copying.wanted.clear();
}

void LocalCheckpoints::begin(SaveAct& act) {
  if (!copies_) copies_ = std::make_shared<PeerCopies>(folder_, dist_.world(), device_);
  auto saving = std::make_shared<Saving>();
  saving->copies = copies_;
  act.partial = partial_folder(folder_.path(), act.tag, act.save_id);
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
  saving_ = std::move(saving);
}

void LocalCheckpoints::publish() {
  comm::Communicator& world = dist_.world();
  const std::shared_ptr<Saving> saving = std::exchange(saving_, nullptr);
  SaveAct& act = saving->act;
  const fs::path partial = partial_folder(folder_.path(), act.tag, act.save_id),
                 place = folder_.path() / act.tag;
  std::string text;
  comm::gather_results(world, "local checkpoint described", [&] {
    if (dist_.rank() == 0) text = act.complete(saving->sums, next_ordinal(save_dir_));
    return true;
  });
  text = comm::broadcast_text(world, text, 0, "manifest");
  const Manifest manifest = Manifest::from_json(text, partial / "manifest.json");
  for (const auto& [name, sum] : manifest.files) {
    if (name.ends_with(".safetensors")) continue;
    const std::string content =
        comm::broadcast_text(world, dist_.rank() == 0 ? read_file(partial / name) : "", 0, name);
    if (folder_.leads() && dist_.rank() != 0) write_file_atomically(partial / name, content);
  }
  comm::gather_results(world, "local checkpoint published", [&] {
    if (!folder_.leads()) return true;
    write_file_atomically(partial / "manifest.json", text);
    if (fs::exists(place)) fs::rename(place, place.string() + ".removed");  // of a run that came here before
    publish_folder(partial, place);
    return true;
  });
  folder_.remove_others(place);
  frozen_.keep(place);
  newest_ = place;
}

void LocalCheckpoints::forget_failed() {
  saving_.reset();
  copies_.reset();
}

void LocalCheckpoints::remove() {
  comm::gather_records(dist_.world(), char{}, "local checkpoints removed");
  forget_failed();
  frozen_.forget();
  newest_.clear();
  folder_.remove();
}

}  // namespace sherd::engine
