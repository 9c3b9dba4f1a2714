#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "offload/queue/transfer.h"
#include "offload/queue/transfer_queue.h"

namespace sherd::offload {

/// The store's thread: cuts transfers into requests, keeps up to queue_depth of them with the backend, goes
/// on where one moved less than asked for, and copies to and from memory that the kernel is not given.
class IoThread {
 public:
  explicit IoThread(TransferQueue& queue);
  /// Until the queue stops and no request is under way.
  void run();

 private:
  /// One of queue_depth requests.
  struct RequestSlot {
    std::shared_ptr<Transfer> transfer;  // null when free
    TransferPiece piece;
    std::byte* pages = nullptr;  // where the kernel puts or finds the piece's pages
    int bounce = -1;             // the buffer that they are in, if it is the store's
    IoRequest rest;              // the part that is not done yet
    bool fetching = false;       // a merge reads before it writes
    int retries = 0;
  };

  void turn();
  void fill();
  void begin(const TransferPiece& piece);
  void request(std::size_t index, bool write);
  void load_and_write(std::size_t index);
  void complete(const IoCompletion& completion);
  bool go_on(std::size_t index, std::int64_t moved);
  bool again(std::size_t index);
  void arrived(std::size_t index);
  void fail_request(std::size_t index, ErrorKind kind, std::uint64_t file_offset, const std::string& cause);
  void release(std::size_t index);
  void hand_over();

  TransferQueue& queue_;
  const Cutting cutting_;
  std::vector<RequestSlot> slots_;
  std::vector<std::size_t> free_slots_;
  std::vector<int> free_bounces_;
  std::shared_ptr<Transfer> current_;  // being cut
  std::vector<IoRequest> outgoing_;    // for the next submit()
  std::vector<IoCompletion> completions_;
  std::size_t under_way_ = 0;
};

}  // namespace sherd::offload
