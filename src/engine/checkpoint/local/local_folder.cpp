#include "engine/checkpoint/local/local_folder.h"

#include <fstream>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/random.h"
#include "comm/exchange/topology.h"
#include "comm/gather.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/save_folder.h"

namespace sherd::engine {
namespace fs = std::filesystem;

namespace {

/// The run's id, which rank 0 keeps in the run's own folder.
std::string run_id(const fs::path& save_dir, bool anew) {
  const fs::path path = save_dir / run_id_file;
  std::string id;
  if (!anew) std::getline(std::ifstream(path), id);
  if (is_save_id(id)) return id;
  id = new_save_id();
  fs::create_directories(save_dir);
  write_file_atomically(path, id + "\n");
  return id;
}

/// The first rank that sees the same folder, found by the files that all leave there; `token` tells them from
/// those of a dead run.
std::uint64_t first_in(comm::Communicator& world, const fs::path& folder, const std::string& token) {
  const auto name = [&](int rank) { return folder / cat("rank_", rank, ".", token, ".here"); };
  comm::gather_results(world, "local checkpoints' folder", [&] {
    std::ofstream own(name(world.rank()));
    if (!own.flush()) fail(ErrorKind::io, "cannot write in '", folder.string(), "'");
    return true;
  });
  int first = 0;
  std::error_code error;
  while (first < world.rank() && !fs::exists(name(first), error)) ++first;
  comm::gather_records(world, char{}, "local checkpoints' folder seen");
  fs::remove(name(world.rank()), error);  // else it goes with the next checkpoint
  return static_cast<std::uint64_t>(first);
}

}  // namespace

std::string local_folder_prefix(const fs::path& save_dir) {
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016llx",
                static_cast<unsigned long long>(stable_hash(fs::absolute(save_dir).string())));
  return cat("sherd-", hash, "-");
}

bool has_begun(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / run_id_file, error);
}

LocalFolder::LocalFolder(comm::Communicator& world, const fs::path& directory, const fs::path& save_dir,
                         bool anew) {
  const fs::path absolute = fs::absolute(save_dir);
  std::string id;
  comm::gather_results(world, "id of the run", [&] {
    if (world.rank() == 0) id = run_id(absolute, anew);
    return true;
  });
  id = comm::broadcast_text(world, id, 0, "id of the run");
  const std::string of_folder = local_folder_prefix(save_dir);
  path_ = fs::absolute(directory) / cat(of_folder, id);
  comm::gather_results(world, "local checkpoints' folder made", [&] {
    std::error_code error;
    fs::create_directories(path_, error);
    if (!error) fs::permissions(path_, fs::perms::owner_all, error);
    if (error)
      fail(ErrorKind::io, "training.local_save_dir: cannot make '", path_.string(), "': ", error.message());
    return true;
  });
  const std::uint64_t first = first_in(world, path_, comm::broadcast_text(world, new_save_id(), 0, "token"));
  machines_ = std::make_shared<comm::Topology>(world.rank(), comm::gather_records(world, first, "machines"));
  if (leads()) {
    for (const fs::path& entry : entries_of(path_.parent_path()))
      if (entry.filename().string().starts_with(of_folder) && entry != path_) remove_folder(entry);
    for (const fs::path& entry : entries_of(path_))
      if (is_leftover(entry.filename().string())) remove_folder(entry);
  }
  comm::gather_records(world, char{}, "local checkpoints' folder tidied");  // before any looks for them
}

bool LocalFolder::leads() const {
  return machines_->is_leader();
}

int LocalFolder::keeper_of(int rank) const {
  return machines_->deputy((machines_->machine_of(rank) + 1) % machines_->machines(), rank);
}

std::vector<LocalCheckpoint> LocalFolder::checkpoints() const {
  std::vector<LocalCheckpoint> out;
  for (const fs::path& entry : entries_of(path_)) {
    std::error_code absent;
    if (is_leftover(entry.filename().string()) || !fs::exists(entry / "manifest.json", absent)) continue;
    try {
      out.push_back(
          {entry, Manifest::from_json(read_file(entry / "manifest.json"), entry / "manifest.json")});
    } catch (const Error& error) {
      log_warning("a local checkpoint cannot be read: ", error.what());
    }
  }
  return out;
}

fs::path LocalFolder::partial(const std::string& tag, const std::string& save_id) const {
  return partial_folder(path_, tag, save_id);
}

fs::path LocalFolder::place(const std::string& tag, const std::string& save_id) const {
  return path_ / cat(tag, ".", save_id);
}

void LocalFolder::remove_others(const fs::path& keep) const {
  if (!leads()) return;
  for (const fs::path& entry : entries_of(path_)) {
    if (entry == keep) continue;
    const fs::path aside = entry.string() + ".removed";  // is no checkpoint from here on
    std::error_code error;
    fs::rename(entry, aside, error);
    remove_folder(error ? entry : aside);
  }
}

void LocalFolder::remove() const {
  if (leads()) remove_folder(path_);
}

}  // namespace sherd::engine
