#include "engine/checkpoint/local/peer_copies.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "comm/exchange/topology.h"
#include "comm/gather.h"
#include "engine/checkpoint/format.h"

namespace sherd::engine {
namespace fs = std::filesystem;
using tensor::Tensor;

FileDescriptor open_to_send(const fs::path& path) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) fail(ErrorKind::io, "cannot read '", path.string(), "': ", std::strerror(errno));
  return file;
}

void read_chunk(const FileDescriptor& file, const fs::path& path, std::uint64_t at, const Tensor& to) {
  for (std::size_t got = 0; got < to.bytes();) {
    const ssize_t read = ::pread(file.get(), to.raw() + got, to.bytes() - got, static_cast<off_t>(at + got));
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0)
      fail(ErrorKind::io, "cannot read '", path.string(),
           "': ", read < 0 ? std::strerror(errno) : "it was cut");
    got += static_cast<std::size_t>(read);
  }
}

namespace {

/// A copy that comes from another machine. What goes wrong here is for the end: others go on sending.
class Arrival {
 public:
  Arrival(int from, const fs::path& path, FileChecksum sum) : from_(from), sum_(sum) {
    try {
      file_.emplace(path);
      file_->reserve(sum.bytes);
    } catch (...) {
      failed_ = std::current_exception();
    }
  }
  int from() const { return from_; }
  std::int64_t next_bytes() const {
    return static_cast<std::int64_t>(std::min<std::uint64_t>(file_chunk, sum_.bytes - found_.bytes));
  }
  void take(const Tensor& chunk) {
    found_.bytes += chunk.bytes();
    found_.crc32c = crc32c(chunk.raw(), chunk.bytes(), found_.crc32c);
    if (failed_) return;
    try {
      file_->write(chunk.raw(), chunk.bytes());
    } catch (...) {
      failed_ = std::current_exception();
    }
  }
  void complete() {
    if (failed_) std::rethrow_exception(failed_);
    if (found_ != sum_)
      fail(ErrorKind::data, "the copy of rank ", from_, "'s states came with CRC-32C ", found_.crc32c,
           " in place of ", sum_.crc32c, ": the network or a machine's memory changes bytes");
    file_->commit();
  }

 private:
  int from_;
  FileChecksum sum_, found_;
  std::optional<AtomicFile> file_;
  std::exception_ptr failed_;
};

}  // namespace

PeerCopies::PeerCopies(const LocalFolder& folder, comm::Communicator& world, device::Device& device)
    : group_(world.split(0, world.rank())),
      keeper_(folder.machines().machines() > 1 ? folder.keeper_of(world.rank()) : -1) {
  group_->bind(device::make_cpu_device(1));  // files have nothing to wait for on a GPU's stream
  group_->set_purpose("copies of local checkpoints");
  for (int rank = 0; keeper_ >= 0 && rank < world.size(); ++rank)
    if (folder.keeper_of(rank) == world.rank()) sources_.push_back(rank);
  comm::gather_results(*group_, "buffers of a local checkpoint", [&] {
    if (keeper_ >= 0)
      buffers_ = device.allocate((1 + sources_.size()) * file_chunk, device::Category::checkpoint,
                                 device::Tier::host);
    return true;
  });
}

/// In steps of a chunk each way, so that nobody waits for a file whose sender waits for another.
void PeerCopies::pass(const std::vector<Transfer>& outgoing, const std::vector<Transfer>& incoming,
                      const std::function<void()>& go_on) {
  const auto buffer = [&](std::size_t index, std::int64_t bytes) {
    return Tensor::view_of(buffers_, index * file_chunk, {bytes}, DType::u8);
  };
  std::vector<FileDescriptor> files;
  std::deque<Arrival> arrivals;
  for (const Transfer& each : outgoing) files.push_back(open_to_send(each.path));
  for (const Transfer& each : incoming) arrivals.emplace_back(each.peer, each.path, each.sum);
  const comm::CallOptions options{.label = "copy of a local checkpoint", .scalar = true, .async = true};
  bool more = true;
  for (std::uint64_t at = 0; more; at += file_chunk) {
    go_on();
    std::vector<comm::Work> works;
    std::vector<std::pair<Arrival*, Tensor>> chunks;
    for (std::size_t i = 0; i < outgoing.size(); ++i) {
      const std::uint64_t bytes = outgoing[i].sum.bytes;
      if (at >= bytes) continue;
      const Tensor chunk =
          buffer(0, static_cast<std::int64_t>(std::min<std::uint64_t>(file_chunk, bytes - at)));
      read_chunk(files[i], outgoing[i].path, at, chunk);
      works.push_back(group_->send(chunk, outgoing[i].peer, options));
    }
    for (std::size_t i = 0; i < arrivals.size(); ++i) {
      const std::int64_t bytes = arrivals[i].next_bytes();
      if (bytes == 0) continue;
      chunks.emplace_back(&arrivals[i], buffer(1 + i, bytes));
      works.push_back(group_->receive(chunks.back().second, arrivals[i].from(), options));
    }
    for (comm::Work& work : works) work.wait();
    for (const auto& [arrival, chunk] : chunks) arrival->take(chunk);
    more = !works.empty();
  }
  comm::gather_results(*group_, "copies of a local checkpoint", [&] {
    for (Arrival& arrival : arrivals) arrival.complete();
    return true;
  });
}

std::vector<FileChecksum> PeerCopies::write(SaveAct& act, const Copying& copying,
                                            const std::function<void()>& go_on) {
  try {
    struct Written {
      FileChecksum sum;
      bool wants_frozen;
    };
    const auto written = comm::gather_results(*group_, "local checkpoint written", [&] {
      return Written{write_rank_file(act.rank_path(), act.file, act.save_id, go_on), !copying.wanted.empty()};
    });
    act.file = {};  // updates of what was not read wait for that
    std::vector<FileChecksum> sums;
    for (const Written& each : written) sums.push_back(each.sum);
    if (keeper_ < 0) return sums;
    const int mine = act.rank;
    std::vector<Transfer> incoming;
    for (const int source : sources_)
      incoming.push_back({source, act.partial / rank_file(source), sums[static_cast<std::size_t>(source)]});
    pass({{keeper_, act.rank_path(), sums[static_cast<std::size_t>(mine)]}}, incoming, go_on);
    // A keeper that lacks one of its sources' frozen files lacks all of them.
    incoming.clear();
    for (const int source : copying.wanted)
      incoming.push_back(
          {source, act.partial / frozen_file(source), copying.frozen[static_cast<std::size_t>(source)]});
    std::vector<Transfer> outgoing;
    const FileChecksum frozen = copying.frozen[static_cast<std::size_t>(mine)];
    if (written[static_cast<std::size_t>(keeper_)].wants_frozen && frozen.bytes > 0)
      outgoing.push_back({keeper_, act.partial / frozen_file(mine), frozen});
    pass(outgoing, incoming, go_on);
    return sums;
  } catch (...) {
    // An error that all ranks throw has broken nothing; a rank that leaves alone tells the others, which wait
    // for it.
    group_->abort("a local checkpoint was given up");
    throw;
  }
}

}  // namespace sherd::engine
