#include "engine/checkpoint/frozen/frozen_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "comm/gather.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/writer.h"

namespace sherd::engine {
namespace fs = std::filesystem;

FrozenFiles::Identity FrozenFiles::identity_of(const fs::path& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0)
    fail(ErrorKind::io, "cannot look at '", path.string(), "': ", std::strerror(errno));
  return {found.st_dev, found.st_ino, static_cast<std::uint64_t>(found.st_size), found.st_mtim.tv_sec,
          found.st_mtim.tv_nsec};
}

/// Whether `path` is a link to the last checkpoint's file now.
bool FrozenFiles::link(const fs::path& path) {
  if (kept_.sum.bytes == 0) return false;
  if (::linkat(AT_FDCWD, kept_.path.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
    if (identity_of(path) == kept_.identity) return true;
    fs::remove(path);
    log_warning("'", kept_.path.string(),
                "' was changed after it was saved: the checkpoint that it is of may be damaged ('sherd "
                "checkpoint verify' tells), and the next one gets a file of its own");
    return false;
  }
  // A checkpoint may go meanwhile, as the user likes.
  if (const int error = errno; error != ENOENT && !std::exchange(said_, true))
    log_info("parameters that do not train are written with each checkpoint, while training waits, as '",
             path.string(), "' cannot be a link to '", kept_.path.string(), "': ", std::strerror(error));
  return false;
}

namespace {
/// The folder that rank 0 made, which a rank on another machine may lack.
void require_shared(const fs::path& partial) {
  std::error_code error;
  if (fs::is_directory(partial, error)) return;
  fail(ErrorKind::io, "rank 0 made the folder '", partial.string(), "', and this rank does not see it",
       error ? ": " + error.message() : "",
       ". Save in a folder (training.save_dir) that all machines share, under the same path");
}
}  // namespace

void FrozenFiles::put(const fs::path& partial, const std::string& save_id) {
  if (refers()) {
    next_ = {}, sums_.assign(static_cast<std::size_t>(dist_.world_size()), {});
    return;
  }
  next_ = {kept_.id.empty() ? save_id : kept_.id, partial / frozen_file(dist_.rank()), {}, {}};
  sums_ = comm::gather_results(dist_.world(), "checkpoint of frozen parameters", [&] {
    require_shared(partial);
    RankFile file{live_tensors(model_, device_, FilePart::frozen), {}};
    if (file.tensors.empty()) return FileChecksum{};
    next_.sum = link(next_.path) ? kept_.sum : write_rank_file(next_.path, file, next_.id);
    next_.identity = identity_of(next_.path);
    return next_.sum;
  });
}

void FrozenFiles::describe(Manifest& manifest) const {
  if (refers()) manifest.base = *base_;
  for (std::size_t rank = 0; rank < sums_.size(); ++rank) {
    if (sums_[rank].bytes == 0) continue;
    manifest.frozen_id = next_.id;
    manifest.files[frozen_file(static_cast<int>(rank))] = sums_[rank];
  }
}

bool FrozenFiles::find_in(const CheckpointReader& reader) {
  const std::vector<FileTensor> mine = live_tensors(model_, device_, FilePart::frozen);
  const std::string name = frozen_file(dist_.rank());
  next_ = {reader.manifest().frozen_id, name, {}, {}};
  const auto sum = reader.manifest().files.find(name);
  if (sum == reader.manifest().files.end()) return mine.empty();
  next_.sum = sum->second;
  next_.identity = identity_of(reader.folder() / name);
  const SafetensorsFile file(reader.folder() / name);
  return file.entries().size() == mine.size() && std::ranges::all_of(mine, [&](const FileTensor& tensor) {
           const SafetensorsEntry* entry = file.find(tensor.name);
           return entry && entry->dtype == tensor.dtype && entry->numel() == tensor.count &&
                  file.metadata().at(tensor.name) == tensor.record.to_json();
         });
}

void FrozenFiles::keep(const fs::path& folder) {
  if (refers()) return;
  kept_ = std::move(next_);
  kept_.path = fs::absolute(folder / kept_.path.filename());
}

}  // namespace sherd::engine
