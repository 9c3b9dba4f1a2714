// LocalCheckpoints' part that goes on from one.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "comm/exchange/topology.h"
#include "comm/gather.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/local/local_checkpoints.h"
#include "engine/checkpoint/save_folder.h"

namespace sherd::engine {
namespace fs = std::filesystem;
using tensor::Tensor;

namespace {

/// A local checkpoint that a rank sees, as it is told to the others.
struct Candidate {
  std::array<char, 16> save_id{};
  std::int64_t ordinal = 0, step = 0;
  std::int32_t rank = -1;  ///< who sees it; -1: nobody
};

void put_newest_first(std::vector<Candidate>& those) {
  std::ranges::stable_sort(those, std::greater{},
                           [](const Candidate& each) { return std::pair(each.ordinal, each.step); });
}

/// All that any rank sees, of one rank the newest few, each once, the newest first.
std::vector<Candidate> gather_candidates(const Distributed& dist, const std::vector<LocalCheckpoint>& here) {
  constexpr std::size_t most = 4;
  std::vector<Candidate> mine;
  for (const LocalCheckpoint& each : here) {
    Candidate& next = mine.emplace_back();
    const std::string& id = each.manifest.save_id;
    std::copy_n(id.begin(), std::min(next.save_id.size(), id.size()), next.save_id.begin());
    next.ordinal = each.manifest.ordinal, next.step = each.manifest.global_steps, next.rank = dist.rank();
  }
  put_newest_first(mine);
  mine.resize(most);
  std::vector<Candidate> out;
  for (const Candidate& each :
       comm::gather_records(dist.world(), std::span<const Candidate>(mine), "local checkpoints"))
    if (each.rank >= 0 &&
        std::none_of(out.begin(), out.end(), [&](const Candidate& c) { return c.save_id == each.save_id; }))
      out.push_back(each);
  put_newest_first(out);
  return out;
}

/// The tag of a local checkpoint of that manifest's step.
std::string tag_of(const Manifest& manifest) {
  return cat("global_step", manifest.global_steps);
}

bool is_whole(const fs::path& path, const FileChecksum& sum) {
  std::error_code error;
  if (fs::file_size(path, error) != sum.bytes || error) return false;
  try {
    return checksum_file(path) == sum;
  } catch (const Error&) {
    return false;
  }
}

/// The head of a safetensors file: its length, and the JSON that says what lies where.
std::string header_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::uint64_t length = 0;
  in.read(reinterpret_cast<char*>(&length), sizeof length);
  if (!in || length > tensor::safetensors_header_limit)
    fail(ErrorKind::io, "cannot read '", path.string(), "'");
  std::string head(sizeof length + length, '\0');
  in.seekg(0).read(head.data(), std::ssize(head));
  if (!in) fail(ErrorKind::io, "cannot read '", path.string(), "'");
  return head;
}

/// A file of which only the head is here: as long as the whole, and takes no room.
void write_stand_in(const fs::path& path, const std::string& head, std::uint64_t bytes) {
  fs::remove(path);  // a damaged one may have another name in the checkpoint before
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << head << std::flush;
  std::error_code error;
  if (out)
    fs::resize_file(path, bytes, error);
  else
    error = {errno, std::system_category()};
  if (error) fail(ErrorKind::io, "cannot write '", path.string(), "': ", error.message());
}

/// Takes a file's bytes from another rank, into what stands in for it.
void receive_file(comm::Communicator& world, int from, const fs::path& path, std::uint64_t bytes,
                  const Tensor& buffer) {
  const FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  int error = file ? 0 : errno;
  for (std::uint64_t done = 0; done < bytes;) {
    const Tensor chunk =
        buffer.range(0, static_cast<std::int64_t>(std::min<std::uint64_t>(buffer.bytes(), bytes - done)));
    world.receive(chunk, from, {.label = "file of a local checkpoint", .scalar = true}).wait();
    // Where there is no room the sender goes on all the same.
    for (std::size_t put = 0; error == 0 && put < chunk.bytes();) {
      const ssize_t written =
          ::pwrite(file.get(), chunk.raw() + put, chunk.bytes() - put, static_cast<off_t>(done + put));
      if (written > 0)
        put += static_cast<std::size_t>(written);
      else if (errno != EINTR)
        error = errno;
    }
    done += chunk.bytes();
  }
  if (error != 0) fail(ErrorKind::io, "cannot write '", path.string(), "': ", std::strerror(error));
}

/// Where it cannot be read the receiver is sent something, and finds it out.
void send_file(comm::Communicator& world, int to, const fs::path& path, std::uint64_t bytes,
               const Tensor& buffer) {
  std::exception_ptr failed;
  FileDescriptor file;
  for (std::uint64_t done = 0; done < bytes;) {
    const Tensor chunk =
        buffer.range(0, static_cast<std::int64_t>(std::min<std::uint64_t>(buffer.bytes(), bytes - done)));
    try {
      if (!failed && !file) file = open_to_send(path);
      if (!failed) read_chunk(file, path, done, chunk);
    } catch (...) {
      failed = std::current_exception();
    }
    world.send(chunk, to, {.label = "file of a local checkpoint", .scalar = true}).wait();
    done += chunk.bytes();
  }
  if (failed) std::rethrow_exception(failed);
}

}  // namespace

bool LocalCheckpoints::Opened::here(std::size_t file, const comm::Topology& machines) const {
  return fetched.contains(file) || std::any_of(holders[file].begin(), holders[file].end(),
                                               [&](int rank) { return machines.is_local(rank); });
}

/// The ranks of a machine look at its files in turn.
std::vector<std::vector<int>> LocalCheckpoints::find_holders(const Opened& opened) const {
  const comm::Topology& machines = folder_.machines();
  std::vector<std::int64_t> mine;
  const auto step = machines.locals().size();
  for (std::size_t i = static_cast<std::size_t>(machines.local_index(dist_.rank()));
       !opened.partial && i < opened.names.size(); i += step)
    if (is_whole(opened.path / opened.names[i], opened.manifest.files.at(opened.names[i])))
      mine.push_back(static_cast<std::int64_t>(i));
  const auto lists = comm::gather_lists(dist_.world(), device_, mine, "files of a local checkpoint");
  std::vector<std::vector<int>> out(opened.names.size());
  for (std::size_t rank = 0; rank < lists.size(); ++rank)
    for (const std::int64_t file : lists[rank])
      out[static_cast<std::size_t>(file)].push_back(static_cast<int>(rank));
  return out;
}

/// Whether all files of the checkpoint that `root` sees are whole somewhere.
bool LocalCheckpoints::find_files(Opened& opened, int root, const std::vector<LocalCheckpoint>& here) {
  for (const LocalCheckpoint& each : here)
    if (each.manifest.save_id == opened.manifest.save_id) opened.path = each.path;
  opened.partial = opened.path.empty();
  std::string text;
  comm::gather_results(dist_.world(), "manifest of a local checkpoint", [&] {
    if (dist_.rank() == root) text = read_file(opened.path / "manifest.json");
    return true;
  });
  text = comm::broadcast_text(dist_.world(), text, root, "manifest of a local checkpoint");
  opened.manifest = Manifest::from_json(text, opened.path / "manifest.json");
  if (opened.partial) opened.path = folder_.partial(tag_of(opened.manifest), opened.manifest.save_id);
  for (const auto& [name, sum] : opened.manifest.files) opened.names.push_back(name);
  opened.holders = find_holders(opened);
  for (std::size_t i = 0; i < opened.names.size(); ++i)
    if (opened.holders[i].empty()) {
      if (dist_.rank() == 0)
        log_warning("the local checkpoint of step ", opened.manifest.global_steps,
                    " cannot be taken: no machine has '", opened.names[i], "' whole any more");
      return false;
    }
  comm::gather_results(dist_.world(), "folder of a local checkpoint", [&] {
    if (!folder_.leads() || !opened.partial) return true;
    fs::create_directories(opened.path);
    write_file_atomically(opened.path / "manifest.json", text);
    return true;
  });
  return true;
}

/// Puts what a reader of heads needs, and small files, where they are missing.
void LocalCheckpoints::make_readable(Opened& opened) const {
  comm::Communicator& world = dist_.world();
  std::exception_ptr failed;  // others go on to what follows
  const auto attempt = [&](const auto& action) {
    try {
      if (!failed) action();
    } catch (...) {
      failed = std::current_exception();
    }
  };
  for (std::size_t i = 0; i < opened.names.size(); ++i) {
    if (std::ssize(opened.holders[i]) == folder_.machines().machines()) continue;
    const std::string& name = opened.names[i];
    const fs::path path = opened.path / name;
    const bool is_small = !name.ends_with(".safetensors");
    const int holder = opened.holders[i].front();
    std::string content;
    if (dist_.rank() == holder) attempt([&] { content = is_small ? read_file(path) : header_of(path); });
    content = comm::broadcast_text(world, content, holder, name);
    if (opened.here(i, folder_.machines())) continue;
    if (is_small) opened.fetched.insert(i);
    if (!folder_.leads()) continue;
    attempt([&] {
      if (is_small)
        write_file_atomically(path, content);
      else
        write_stand_in(path, content, opened.manifest.files.at(name).bytes);
    });
  }
  comm::gather_results(world, "local checkpoint made readable", [&] {
    if (failed) std::rethrow_exception(failed);
    return true;
  });
}

std::optional<fs::path> LocalCheckpoints::open_newest(const Manifest* other) {
  const std::vector<LocalCheckpoint> here = folder_.checkpoints();
  for (const Candidate& each : gather_candidates(dist_, here)) {
    Opened opened;
    opened.manifest.save_id.assign(each.save_id.begin(), each.save_id.end());
    opened.manifest.ordinal = each.ordinal, opened.manifest.global_steps = each.step;
    // A file checkpoint has the number that the local ones before it would have had.
    if (other && each.ordinal <= other->ordinal) break;
    try {
      if (!find_files(opened, each.rank, here)) continue;
      make_readable(opened);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::io) throw;
      pass_over(opened, error.what());
      continue;
    } catch (const fs::filesystem_error& error) {  // on the rank that met it; the others have Error{io}
      pass_over(opened, error.what());
      continue;
    }
    opened_ = std::move(opened);
    return opened_->path;
  }
  return {};
}

/// Where a machine has no room for what it lacks, an older checkpoint is what there is.
void LocalCheckpoints::pass_over(const Opened& opened, const std::string& reason) const {
  if (dist_.rank() == 0)
    log_warning("the local checkpoint of step ", opened.manifest.global_steps, " cannot be taken: ", reason);
  if (!folder_.leads()) return;
  if (opened.partial) return remove_folder(opened.path);
  std::error_code ignored;
  for (std::size_t i = 0; i < opened.holders.size(); ++i)
    if (!opened.here(i, folder_.machines())) fs::remove(opened.path / opened.names[i], ignored);
}

bool LocalCheckpoints::fetch(const CheckpointReader& reader, const std::set<std::string>& needed) {
  try {
    fetch_files(reader, needed);
    return true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::comm) throw;
    opened_->fetched.clear();
    pass_over(*opened_, error.what());
    opened_.reset();
    return false;
  }
}

void LocalCheckpoints::fetch_files(const CheckpointReader& reader, const std::set<std::string>& needed) {
  comm::Communicator& world = dist_.world();
  const comm::Topology& machines = folder_.machines();
  Opened& opened = *opened_;
  std::vector<std::int64_t> mine;
  for (std::size_t i = 0; i < opened.names.size(); ++i)
    if (needed.contains(opened.names[i]) && !opened.here(i, machines))
      mine.push_back(static_cast<std::int64_t>(i));
  const auto lists = comm::gather_lists(world, device_, mine, "files that machines lack");
  std::set<std::pair<std::size_t, int>> wanted;  // file, machine
  for (std::size_t rank = 0; rank < lists.size(); ++rank)
    for (const std::int64_t file : lists[rank])
      wanted.emplace(static_cast<std::size_t>(file), machines.machine_of(static_cast<int>(rank)));
  Tensor buffer;
  comm::gather_results(world, "buffer for files of a local checkpoint", [&] {
    if (!wanted.empty())
      buffer = Tensor::on_host(device_, {file_chunk}, DType::u8, device::Category::checkpoint);
    return true;
  });
  std::exception_ptr failed;
  for (const auto& [file, machine] : wanted) {
    const std::vector<int>& holders = opened.holders[file];
    const std::vector<int>& takers = machines.ranks_on(machine);
    const int from = holders[static_cast<std::size_t>(machine) % holders.size()],
              to = takers[file % takers.size()];
    const std::string& name = opened.names[file];
    const std::uint64_t bytes = opened.manifest.files.at(name).bytes;
    if (machine == machines.machine()) opened.fetched.insert(file);
    try {
      if (dist_.rank() == from) send_file(world, to, opened.path / name, bytes, buffer);
      if (dist_.rank() != to) continue;
      receive_file(world, from, opened.path / name, bytes, buffer);
      reader.verify(name);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::comm) throw;
      failed = std::current_exception();
    }
  }
  comm::gather_results(world, "files of a local checkpoint fetched", [&] {
    if (failed) std::rethrow_exception(failed);
    return true;
  });
}

fs::path LocalCheckpoints::settle() {
  const Opened opened = std::move(*opened_);
  opened_.reset();
  const fs::path place = folder_.place(tag_of(opened.manifest), opened.manifest.save_id);
  comm::gather_results(dist_.world(), "local checkpoint settled", [&] {
    if (!folder_.leads()) return true;
    for (std::size_t i = 0; i < opened.names.size(); ++i)
      if (!opened.here(i, folder_.machines())) fs::remove(opened.path / opened.names[i]);
    if (opened.partial) publish_folder(opened.path, place);
    return true;
  });
  keep(opened.partial ? place : opened.path, opened.manifest, 0);
  return newest_path_;
}

}  // namespace sherd::engine
