#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simt/simt.h"

namespace sherd::emulated_gpu {

/// One mutex for all cards, streams and memory: whoever calls the runtime, or runs its work, holds it.
std::recursive_mutex& mutex();

/// Ends the program: what a card would answer with wrong data or a fault.
[[noreturn]] void stop(const std::string& why);

// ---- memory ----

enum class Place : unsigned char { pageable, host, device };

struct Block {
  std::size_t bytes = 0;
  Place place = Place::pageable;
  int card = 0;
  bool enlisted = false;  ///< others' memory
};

/// CUDA's knowledge of memory. With mutex() locked.
class Memory {
 public:
  /// Memory that begins as ones; null where the card's capacity is spent.
  void* allocate(std::size_t bytes, Place place, int card);
  void free(void* data);
  /// False where part of it is known already.
  bool enlist(void* data, std::size_t bytes, int card);
  bool strike(void* data);
  void strike_all();
  /// The block that holds this address, or null: pageable memory.
  const Block* find(const void* data) const;
  /// Stops unless [data, data + bytes) lies in one block.
  void require_known(const void* data, std::size_t bytes, const char* what) const;
  std::size_t used(int card) const;

 private:
  std::map<const std::byte*, Block> blocks_;
  std::map<int, std::size_t> used_;
};
Memory& memory();
std::size_t capacity();
/// The cards' compute capability, 90 where SHERD_EMULATED_GPU_CAPABILITY says no other.
int capability();

// ---- streams ----

using Work = std::function<void()>;

/// A kernel with copies of its arguments.
struct Kernel {
  const void* entry;
  simt::Dim3 grid, block;
  std::size_t shared_bytes;
  std::vector<std::vector<std::byte>> arguments;

  static Kernel of(const void* entry, simt::Dim3 grid, simt::Dim3 block, std::size_t shared_bytes,
                   void* const* arguments);
  void run();
};

/// A work of a graph: a kernel, or anything else.
struct Node {
  std::shared_ptr<Kernel> kernel;
  Work other;
};
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
};

/// Does nothing until somebody waits: the latest that a card may run its work. With mutex() locked.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  explicit Queue(int card) : card_(card) {}
  int card() const { return card_; }
  void add(Work work);
  std::size_t size() const { return works_.size(); }
  std::size_t done() const { return done_; }
  void run_to(std::size_t position);
  void run_all() { run_to(works_.size()); }
  /// Counts what is queued as done.
  void drop() { done_ = works_.size(); }

  std::unique_ptr<Graph> captured;  ///< not null: what comes is captured

 private:
  const int card_;
  std::vector<Work> works_;
  std::size_t done_ = 0;
};

// ---- for tests ----

/// The requests of this process to its cards since it began. Work in graphs counts as their launches alone.
struct Counts {
  std::size_t kernels = 0;        ///< launched one by one
  std::size_t library_calls = 0;  ///< of cuBLASLt
  std::size_t graphs = 0;         ///< launched
  std::size_t copies = 0, fills = 0;
  std::size_t up = 0, down = 0, within = 0;  ///< bytes of copies to a card, to the host, and on cards
  std::size_t events = 0;                    ///< recorded
  std::size_t waits = 0;                     ///< of streams for events
  std::size_t host_waits = 0;  ///< moments at which the host asked again for what it had seen not done
  std::size_t blocks = 0;      ///< of memory, taken from the driver
  std::size_t peers = 0;       ///< cards that were let into another's pool of memory

  Counts operator-(const Counts& before) const;
};
Counts counts();

/// Work that has run on all cards since the program began.
std::size_t works_run();
/// When that many more works have run all cards fail: every call that touches one answers
/// cudaErrorIllegalAddress and nothing runs any more, as after a kernel's wild write, until mend().
void break_after(std::size_t works);
bool broken();
/// Forgets the failure, and all that was queued.
void mend();
/// Whether this process has begun to work on a card.
bool has_context(int card);

/// Queues what a library does on `stream`, a cudaStream_t, or captures it. False for no stream.
bool queue_on(void* stream, Work work);

}  // namespace sherd::emulated_gpu
