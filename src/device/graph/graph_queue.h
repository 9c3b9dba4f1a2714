#pragma once

#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "device/graph/kernel_sequence.h"

namespace sherd::device {

/// A sequence of work that the driver starts at once. Used by one thread at a time.
class Graph {
 public:
  virtual ~Graph() = default;
  /// Launches from now on run one of its kernels with the arguments that it has in `sequence`; those queued
  /// before keep theirs.
  virtual void set(std::size_t work, const KernelSequence& sequence) = 0;
  /// Queues all works, on the stream for which the graph was made.
  virtual void launch() = 0;
};

/// Makes graphs for one stream.
class GraphMaker {
 public:
  virtual ~GraphMaker() = default;
  /// A graph of the works, none of which it runs; null where they cannot be made one.
  virtual std::unique_ptr<Graph> make(const KernelSequence& sequence) = 0;
};

/// A stream that defers kernels and libraries' calls until a sequence of them ends, and runs a sequence that
/// comes again as a graph: one call of the driver in place of one for each kernel, and less of a pause
/// between kernels.
///
/// A sequence ends where end_sequence() is called, where anybody looks at the order of the stream (an event,
/// a wait, the native handle) and when it grows long, so nobody can tell that work was deferred. A sequence
/// becomes a graph when it comes the second time, with the same kernels and the same calls, addresses
/// included. In kernels' arguments (a random key, a step's factor) it may differ from time to time. One that
/// never comes again is run work by work.
///
/// Work that fails while it is handed over fails for whoever made the sequence end; from then on every call
/// throws the same. Safe from any thread.
class GraphQueue final : public StreamQueue {
 public:
  struct Limits {
    std::size_t least_works = 4;    ///< works of a sequence that is worth a graph
    std::size_t most_works = 256;   ///< works of a sequence
    std::size_t most_graphs = 512;  ///< kept at once
    /// Sequences that pass without a graph before it makes room for another, where there are most_graphs. So
    /// work that takes more of them in turn keeps those that it has, rather than make them anew forever.
    std::uint64_t idle = 4096;
  };
  GraphQueue(std::unique_ptr<StreamQueue> inner, std::unique_ptr<GraphMaker> maker);
  GraphQueue(std::unique_ptr<StreamQueue> inner, std::unique_ptr<GraphMaker> maker, const Limits& limits);
  ~GraphQueue() override;

  std::shared_ptr<const StreamEvent> record() override;
  void follow(const StreamEvent& event) override;
  void* native() override;
  void launch(const KernelLaunch& kernel) override;
  void call(const LibraryCall& call) override;
  void end_sequence() override;

  GraphCounts counts() const;

 private:
  struct Known {
    /// As the graph has it; its calls own what the graph runs (a library's kernels), and so go after it.
    KernelSequence sequence;
    std::unique_ptr<Graph> graph;  ///< none: seen once, or the maker could not
    bool hopeless = false;
    std::uint64_t used = 0;  ///< the last sequence that it was
  };
  struct Retired {
    Known known;
    std::shared_ptr<const StreamEvent> after;
  };
  // All with mutex_ locked.
  template <class Work>
  void defer(const Work& work);
  void hand_over();
  void run_one_by_one();
  bool run_as_graph();
  bool has_room();
  void forget();

  const Limits limits_;
  mutable std::mutex mutex_;
  std::unique_ptr<StreamQueue> inner_;  // these, all guarded by mutex_
  std::unique_ptr<GraphMaker> maker_;
  KernelSequence sequence_;
  std::map<std::uint64_t, Known> known_;  // by fingerprint
  std::size_t kept_graphs_ = 0;
  std::uint64_t full_until_ = 0;  ///< the sequence before which no graph makes room
  std::list<Retired> retired_;
  std::uint64_t sequences_ = 0;
  GraphCounts counts_;
  std::exception_ptr failure_;
};

}  // namespace sherd::device
