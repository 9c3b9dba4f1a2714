// NCCL for lazy GPUs, whose ranks are threads. What a rank queues as a group is one piece of work on its
// stream. It runs for all ranks at once, when the first of their streams comes to it, and what the others
// have queued before it runs first: so data that no mark holds back is stale, and memory that is freed too
// early has other data in it. As in NCCL, calls do not say whether they belong together: those that do not
// never end.
#include "tests/comm/nccl/fake_nccl.h"

#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "support/gpu/lazy_cuda.h"

namespace {

using sherd::testing::LazyQueue;

struct Operation {
  enum Kind { all_gather, broadcast, send, receive, reduce_scatter, all_reduce } kind;
  const std::byte* from;
  std::byte* to;
  std::size_t bytes;  ///< for sums: those that each rank gets
  int peer;           ///< for sums: the type
};

struct Batch {
  std::vector<Operation> operations;
  LazyQueue::State* stream;
  std::size_t position;  ///< its place among what is queued on the stream
};

struct Group;
/// One rank of a communicator. All of this is guarded by LazyQueue::mutex().
struct Member {
  std::shared_ptr<Group> group;  ///< null while it is being split off
  int rank = -1;
  bool aborted = false, finalized = false;
  std::vector<Batch> batches;
  std::vector<std::pair<int, int>> splits;  ///< color and key
};

struct Group {
  int size = 0;
  std::vector<std::shared_ptr<Member>> members;  ///< by rank; null until it joins
  std::size_t executed = 0;                      ///< batches
  struct Split {
    std::vector<std::shared_ptr<Member>> parts;  ///< by rank; null for those in none
    std::vector<ncclComm_t*> handles;            ///< set when all ranks have come, as NCCL does
  };
  std::vector<Split> splits;

  bool complete() const {
    return std::none_of(members.begin(), members.end(), [](const auto& m) { return m == nullptr; });
  }
  /// Batch k of all ranks is there.
  bool met(std::size_t k) const {
    return complete() &&
           std::all_of(members.begin(), members.end(), [&](const auto& m) { return m->batches.size() > k; });
  }
};

struct Library {
  std::map<std::uint64_t, std::shared_ptr<Group>> groups;  ///< by unique id, while members are still to join
  std::vector<std::shared_ptr<Group>> made;                ///< all there were
  std::uint64_t ids = 0;
  sherd::comm::fake_nccl::Counts counts;
  int broken = -1;
  bool hanging = false;

  /// Members and their groups hold each other.
  ~Library() {
    for (const auto& group : made) group->members.clear(), group->splits.clear();
  }
};
Library& library() {
  static Library all;
  return all;
}

std::shared_ptr<Group> make_group() {
  return library().made.emplace_back(std::make_shared<Group>());
}

thread_local bool removed = false;

using Lock = std::lock_guard<std::recursive_mutex>;

std::vector<Operation> pick(const Batch& batch, bool transfers) {
  std::vector<Operation> out;
  for (const Operation& each : batch.operations)
    if ((each.kind == Operation::send || each.kind == Operation::receive) == transfers) out.push_back(each);
  return out;
}

/// The transfers of `kind` with `peer`, in order.
std::vector<Operation> with(const Batch& batch, Operation::Kind kind, int peer) {
  std::vector<Operation> out;
  for (const Operation& each : batch.operations)
    if (each.kind == kind && each.peer == peer) out.push_back(each);
  return out;
}

/// Calls visit(to, from, bytes) for everything that batch k moves; false where the ranks' batches do not
/// belong together.
template <class Visit>
bool for_each_move(const Group& group, std::size_t k, const Visit& visit) {
  const auto batch = [&](int r) -> const Batch& {
    return group.members[static_cast<std::size_t>(r)]->batches[k];
  };
  const std::vector<Operation> first = pick(batch(0), false);
  for (int r = 0; r < group.size; ++r) {
    const std::vector<Operation> mine = pick(batch(r), false);
    if (mine.size() != first.size()) return false;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const Operation& op = mine[i];
      if (op.kind != first[i].kind || op.bytes != first[i].bytes || op.peer != first[i].peer) return false;
      for (int s = 0; s < group.size; ++s) {
        const std::vector<Operation> theirs = pick(batch(s), false);
        if (theirs.size() != first.size()) return false;
        if (op.kind == Operation::reduce_scatter || op.kind == Operation::all_reduce)
          continue;  // in add_sums()
        if (op.kind == Operation::all_gather)
          visit(op.to + static_cast<std::size_t>(s) * op.bytes, theirs[i].from, op.bytes);
        else if (s == op.peer)
          visit(op.to, theirs[i].from, op.bytes);
      }
    }
    for (int s = 0; s < group.size; ++s) {
      const auto taken = with(batch(r), Operation::receive, s), sent = with(batch(s), Operation::send, r);
      if (taken.size() != sent.size()) return false;
      for (std::size_t i = 0; i < taken.size(); ++i) {
        if (taken[i].bytes != sent[i].bytes) return false;
        visit(taken[i].to, sent[i].from, taken[i].bytes);
      }
    }
  }
  return true;
}

using Moves = std::vector<std::pair<std::byte*, std::vector<std::byte>>>;

/// As a ring that ends at rank 0 would: from the last rank to the first, rounded at every hop.
template <class T, class Wide>
void sum_backwards(const std::vector<const std::byte*>& sources, std::vector<std::byte>& out) {
  for (std::size_t at = 0; at < out.size(); at += sizeof(T)) {
    T sum{};
    for (std::size_t k = sources.size(); k-- > 0;) {
      T next;
      std::memcpy(&next, sources[k] + at, sizeof next);
      sum = k + 1 == sources.size() ? next : T(static_cast<Wide>(sum) + static_cast<Wide>(next));
    }
    std::memcpy(&out[at], &sum, sizeof sum);
  }
}

/// Adds up batch k for every rank.
void add_sums(const Group& group, std::size_t k, Moves& moves) {
  std::vector<std::vector<Operation>> all;
  for (const auto& member : group.members) all.push_back(pick(member->batches[k], false));
  for (std::size_t r = 0; r < all.size(); ++r)
    for (std::size_t i = 0; i < all[r].size(); ++i) {
      const Operation& op = all[r][i];
      if (op.kind != Operation::reduce_scatter && op.kind != Operation::all_reduce) continue;
      const std::size_t offset = op.kind == Operation::reduce_scatter ? r * op.bytes : 0;
      std::vector<const std::byte*> sources;
      for (const auto& theirs : all) sources.push_back(theirs[i].from + offset);
      std::vector<std::byte> sum(op.bytes);
      if (op.peer == ncclFloat64) sum_backwards<double, double>(sources, sum);
      if (op.peer == ncclFloat32) sum_backwards<float, float>(sources, sum);
      if (op.peer == ncclBfloat16) sum_backwards<sherd::bf16, float>(sources, sum);
      if (op.peer == ncclFloat16) sum_backwards<sherd::f16, float>(sources, sum);
      moves.emplace_back(op.to, std::move(sum));
      ++library().counts.sums;
    }
}

bool belong_together(const Group& group, std::size_t k) {
  return for_each_move(group, k, [](std::byte*, const std::byte*, std::size_t) {});
}

void execute(Group& group, std::size_t k) {
  if (group.executed > k || !group.met(k) || !belong_together(group, k)) return;
  for (const auto& member : group.members)
    if (member->aborted) return;
  for (const auto& member : group.members) member->batches[k].stream->run_to(member->batches[k].position);
  if (group.executed > k) return;
  // All read before any is written, as far as the streams can tell.
  Moves moves;
  for_each_move(group, k, [&](std::byte* to, const std::byte* from, std::size_t bytes) {
    if (to != from) moves.emplace_back(to, std::vector<std::byte>(from, from + bytes));
  });
  add_sums(group, k, moves);
  for (const auto& [to, bytes] : moves)
    if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  group.executed = k + 1;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Member> member;
};

namespace {

/// The calls between ncclGroupStart() and ncclGroupEnd().
struct Pending {
  std::vector<Operation> operations;
  ncclComm* comm = nullptr;
  LazyQueue::State* stream = nullptr;
};
thread_local Pending pending;

ncclResult_t add(const Operation& operation, ncclComm* comm, cudaStream_t stream) {
  pending.operations.push_back(operation);
  pending.comm = comm;
  pending.stream = reinterpret_cast<LazyQueue::State*>(stream);
  return ncclSuccess;
}
const std::byte* bytes_at(const void* data) {
  return static_cast<const std::byte*>(data);
}

std::size_t width_of(ncclDataType_t type) {
  return type == ncclFloat64 ? 8 : type == ncclFloat32 ? 4 : 2;
}

bool settled(const Member& member) {
  const auto& group = member.group;
  if (!group || !group->complete()) return false;
  if (member.finalized && group->executed < member.batches.size()) return false;
  for (std::size_t k = 0; k < member.splits.size(); ++k)
    for (const auto& other : group->members)
      if (other->splits.size() <= k) return false;
  if (member.batches.empty()) return true;
  const std::size_t last = member.batches.size() - 1;
  return group->met(last) && belong_together(*group, last);
}

/// The groups of a split that all ranks have asked for.
void finish_split(Group& group, std::size_t serial) {
  for (const auto& member : group.members)
    if (!member || member->splits.size() <= serial) return;
  std::map<int, std::vector<int>> members;
  for (int r = 0; r < group.size; ++r)
    members[group.members[static_cast<std::size_t>(r)]->splits[serial].first].push_back(r);
  for (auto& [color, ranks] : members) {
    if (color == NCCL_SPLIT_NOCOLOR) continue;
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return group.members[static_cast<std::size_t>(a)]->splits[serial].second <
             group.members[static_cast<std::size_t>(b)]->splits[serial].second;
    });
    auto part = make_group();
    part->size = static_cast<int>(ranks.size());
    for (const int r : ranks) {
      const auto& joined = group.splits[serial].parts[static_cast<std::size_t>(r)];
      joined->rank = static_cast<int>(part->members.size()), joined->group = part;
      part->members.push_back(joined);
      if (!group.members[static_cast<std::size_t>(r)]->aborted)  // or nobody waits for it any more
        *group.splits[serial].handles[static_cast<std::size_t>(r)] = new ncclComm{joined};
    }
  }
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) {
  if (removed) sherd::fail(sherd::ErrorKind::io, "NCCL cannot be loaded");
  *version = 22809;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t status) {
  return status == ncclRemoteError ? "remote process exited or there was a network error" : "no error";
}
const char* ncclGetLastError(ncclComm_t) {
  return "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Lock lock(LazyQueue::mutex());
  *id = {};
  std::memcpy(id->internal, &++library().ids, sizeof library().ids);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const Lock lock(LazyQueue::mutex());
  std::uint64_t number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  auto& waiting = library().groups[number];
  if (!waiting) waiting = make_group();
  const std::shared_ptr<Group> group = waiting;  // which is erased there once it is complete
  group->size = size;
  group->members.resize(static_cast<std::size_t>(size));
  auto& member = group->members[static_cast<std::size_t>(rank)];
  if (member || config->blocking) return ncclInvalidArgument;
  member = std::make_shared<Member>();
  member->group = group, member->rank = rank;
  if (group->complete()) library().groups.erase(number);
  ++library().counts.made;
  *comm = new ncclComm{group->members[static_cast<std::size_t>(rank)]};
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config) {
  const Lock lock(LazyQueue::mutex());
  Member& member = *comm->member;
  Group& group = *member.group;
  if (config->blocking) return ncclInvalidArgument;
  const std::size_t serial = member.splits.size();
  member.splits.emplace_back(color, key);
  group.splits.resize(std::max(group.splits.size(), serial + 1));
  group.splits[serial].parts.resize(static_cast<std::size_t>(group.size));
  group.splits[serial].handles.resize(static_cast<std::size_t>(group.size));
  *part = nullptr;
  if (color != NCCL_SPLIT_NOCOLOR) {
    group.splits[serial].parts[static_cast<std::size_t>(member.rank)] = std::make_shared<Member>();
    group.splits[serial].handles[static_cast<std::size_t>(member.rank)] = part;
    ++library().counts.made;
  }
  finish_split(group, serial);
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* status) {
  const Lock lock(LazyQueue::mutex());
  if (library().broken == comm->member->rank)
    *status = ncclRemoteError;
  else
    *status = settled(*comm->member) && !library().hanging ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}

/// Ends when all that was queued has.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Lock lock(LazyQueue::mutex());
  comm->member->finalized = true;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Lock lock(LazyQueue::mutex());
  const Member& member = *comm->member;
  if (!member.finalized || !settled(member)) return ncclInvalidArgument;
  ++library().counts.destroyed;
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Lock lock(LazyQueue::mutex());
  ++library().counts.aborted;
  comm->member->aborted = true;
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  pending = {};
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const Pending queued = std::exchange(pending, {});
  if (!queued.comm) return ncclSuccess;
  const Lock lock(LazyQueue::mutex());
  const std::shared_ptr<Member> member = queued.comm->member;
  const std::size_t k = member->batches.size();
  member->batches.push_back({queued.operations, queued.stream, queued.stream->work.size()});
  queued.stream->add([member, k] {
    if (!member->aborted) execute(*member->group, k);
  });
  return settled(*member) && !library().hanging ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t, ncclComm_t comm,
                           cudaStream_t stream) {
  return add({Operation::all_gather, bytes_at(from), static_cast<std::byte*>(to), count, -1}, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return add({Operation::broadcast, bytes_at(from), static_cast<std::byte*>(to), count, root}, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  const std::size_t bytes = count * width_of(type);
  return add({Operation::reduce_scatter, bytes_at(from), static_cast<std::byte*>(to), bytes, type}, comm,
             stream);
}
ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t comm, cudaStream_t stream) {
  const std::size_t bytes = count * width_of(type);
  return add({Operation::all_reduce, bytes_at(from), static_cast<std::byte*>(to), bytes, type}, comm, stream);
}
ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add({Operation::send, bytes_at(from), nullptr, count, peer}, comm, stream);
}
ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add({Operation::receive, nullptr, static_cast<std::byte*>(to), count, peer}, comm, stream);
}

namespace sherd::comm::fake_nccl {

Counts take_counts() {
  const Lock lock(LazyQueue::mutex());
  return std::exchange(library().counts, {});
}
void break_rank(int rank) {
  const Lock lock(LazyQueue::mutex());
  library().broken = rank;
}
void remove(bool on) {
  removed = on;
}
void hang(bool on) {
  const Lock lock(LazyQueue::mutex());
  library().hanging = on;
}

}  // namespace sherd::comm::fake_nccl
