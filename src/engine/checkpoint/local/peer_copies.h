#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/files.h"
#include "comm/communicator.h"
#include "device/device.h"
#include "engine/checkpoint/local/local_folder.h"
#include "engine/checkpoint/writer.h"

namespace sherd::engine {

/// Takes the files of local checkpoints from machine to machine, over a group of its own, so that it works on
/// the thread that writes them while training goes on. Made on the rank's thread by all ranks; then one
/// thread at a time.
class PeerCopies {
 public:
  /// The buffers are charged to `device` (host tier, category `checkpoint`). Throws on all ranks where one
  /// has no memory for them. Collective.
  PeerCopies(const LocalFolder& folder, comm::Communicator& world, device::Device& device);

  /// One act of saving.
  struct Copying {
    std::vector<FileChecksum> frozen;  ///< frozen files by rank, this rank's lies in the folder already
    std::vector<int> wanted;           ///< ranks of whose frozen files this one lacks the copy
  };
  /// The ranks whose copies this one keeps.
  const std::vector<int>& sources() const { return sources_; }

  /// Writes this rank's file into act.partial, sends it to its keeper, and writes there what others send; all
  /// of it is verified. Returns the checksums of all ranks' files. `go_on` is called now and then, and may
  /// throw. Throws on all ranks what one of them met. Collective.
  std::vector<FileChecksum> write(SaveAct& act, const Copying& copying, const std::function<void()>& go_on);

 private:
  /// A file on its way from here or to here.
  struct Transfer {
    int peer;
    std::filesystem::path path;
    FileChecksum sum;
  };
  void pass(const std::vector<Transfer>& outgoing, const std::vector<Transfer>& incoming,
            const std::function<void()>& go_on);

  std::unique_ptr<comm::Communicator> group_;
  int keeper_;  ///< the rank with the copy of this rank's file; -1: all ranks are on one machine
  std::vector<int> sources_;
  device::Storage buffers_;  ///< a chunk to send, and one from each source
};

/// A file that is to be sent.
FileDescriptor open_to_send(const std::filesystem::path& path);
/// Fills the tensor of bytes from byte `at` of the file on. Throws Error{io} naming `path`.
void read_chunk(const FileDescriptor& file, const std::filesystem::path& path, std::uint64_t at,
                const tensor::Tensor& to);

/// Bytes of a chunk in which files travel.
inline constexpr std::int64_t file_chunk = std::int64_t{4} << 20;

}  // namespace sherd::engine
