#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "sharding/gradients/turns.h"
#include "sharding/schedule/check_lists.h"

namespace sherd::sharding {

/// A layout, and what it runs. Ranks are stages × replicas × shards; expert ranks are neighbours among
/// shards.
struct ReplicaCase {
  config::Schedule schedule = config::Schedule::gpipe;
  int stages = 1, chunks = 1, micro_batches = 1;
  int replicas = 2, shards = 1, experts = 1;
  bool tied = false;  ///< a table that the first and the last chunk use
  bool overlap = true;
  bool folds = true;     ///< every micro-batch's gradients are folded (stages 2 and 3), else once per step
  bool gathers = false;  ///< sums are gathered again (stage 0)
  std::int64_t bucket = 1;
  std::uint64_t router = 0;  ///< which experts have tokens; 0: a model without experts

  /// Mistakes that the rules forbid, for a test that sees them found.
  enum class Fault { none, tied_in_backward, experts_among_dense, lags_swapped, no_tokens_no_turn } fault{};

  std::string text() const {
    return cat("schedule ", int(schedule), ", ", stages, " stages, ", chunks, " chunks, ", micro_batches,
               " micro-batches, ", replicas, " replicas, ", shards, " shards, ", experts, " expert ranks",
               tied ? ", tied" : "", overlap ? ", overlap" : "", folds ? ", folds" : "",
               gathers ? ", gathers" : "", ", bucket ", bucket, ", router ", router);
  }
};

/// The waits of all ranks of a layout in one step, without their work: what Gradients submits, what the
/// turns of its reducers wait for, and what passes exchange meanwhile. Programs are made first, of marks that
/// a rank sets and marks that it waits for; as none is ever taken back, how they run decides nothing.
class ReplicaSimulation {
 public:
  explicit ReplicaSimulation(const ReplicaCase& what) : case_(what) {
    ScheduleShape shape;
    shape.stages = what.stages, shape.chunks = what.chunks, shape.micro_batches = what.micro_batches;
    lists_ = lists_of(what.schedule, shape);
  }

  /// The first thing that is wrong; empty: all ranks come to their end.
  std::string run() {
    for (int stage = 0; stage < case_.stages; ++stage)
      for (int replica = 0; replica < case_.replicas; ++replica)
        for (int shard = 0; shard < case_.shards; ++shard) make_program(stage, replica, shard);
    for (const auto* table : {&calls_, &transfers_})
      for (const auto& [group, calls] : *table)
        for (const auto& [rank, labels] : calls)
          if (labels != calls.begin()->second)
            return cat(table == &calls_ ? "ranks " : "replicas ", calls.begin()->first, " and ", rank,
                       " of group ", group, " make other calls");
    return play();
  }
  std::size_t most_under_way() const { return most_under_way_; }

 private:
  using Key = std::uint64_t;
  struct Action {
    bool waits;
    Key key;
  };
  struct Bucket {
    bool last, folds;
    std::string label;
    Key group = 0;             ///< the ranks that fold
    Key call = 0;              ///< the fold's number among its group's calls
    std::size_t transfer = 0;  ///< its number among those that replicas exchange
  };
  struct Item {
    std::string name;
    std::int64_t left;
    bool last, folds;
  };
  /// The items that one group of ranks has waiting, in order.
  struct Queue {
    Key group;
    std::deque<Item> items;
    std::int64_t elements = 0;
  };
  struct Chain {
    Key id;
    int place, length;
  };
  struct Sums {
    Chain chain;
    Turns turns;
    std::deque<Queue> queues;
    std::vector<Bucket> buckets;
    std::size_t settled = 0, transfers = 0;
  };
  enum Mark : Key { call_mark, sent_mark, returned_mark, launched_mark, value_mark };
  enum Group : Key {
    shard_group = 1,
    expert_group,
    same_experts,
    replicas_of_experts,
    table_group,
    world_group
  };

  static Key key(Key kind, Key id, Key who, Key n) { return kind << 60 | id << 36 | who << 24 | n; }
  Key group(Group kind, int a = 0, int b = 0, int c = 0) const {
    return kind << 18 | Key(a) << 12 | Key(b) << 6 | Key(c);
  }

  // ---- one rank's program ----

  void set(Key key) { programs_.back().push_back({false, key}); }
  void wait(Key key) { programs_.back().push_back({true, key}); }

  Key call(Key group, const std::string& label) {
    std::vector<std::string>& calls = calls_[group][rank_];
    calls.push_back(label);
    set(key(call_mark, group, Key(rank_), calls.size()));
    return calls.size();
  }
  /// Groups' members, as ranks.
  void wait_for_call(Key group, Key n) {
    for (const int member : members(group)) wait(key(call_mark, group, Key(member), n));
  }
  void exchange(Key group, const std::string& label) { wait_for_call(group, call(group, label)); }

  int rank_of(int stage, int replica, int shard) const {
    return (stage * case_.replicas + replica) * case_.shards + shard;
  }
  std::vector<int> members(Key group) const {
    const Key kind = group >> 18;
    const int a = group >> 12 & 63, b = group >> 6 & 63, c = group & 63;
    std::vector<int> out;
    for (int stage = 0; stage < case_.stages; ++stage)
      for (int r = 0; r < case_.replicas; ++r)
        for (int s = 0; s < case_.shards; ++s) {
          const int expert = s % case_.experts, first = s / case_.experts;
          const bool outer = stage == 0 || stage + 1 == case_.stages;
          if (kind == world_group || (kind == shard_group && stage == a && r == b) ||
              (kind == expert_group && stage == a && r == b && first == c) ||
              (kind == same_experts && stage == a && r == b && expert == c) ||
              (kind == replicas_of_experts && stage == a && expert == c) ||
              (kind == table_group && outer && s == c))
            out.push_back(rank_of(stage, r, s));
        }
    return out;
  }

  void make_program(int stage, int replica, int shard) {
    stage_ = stage, replica_ = replica, shard_ = shard;
    rank_ = rank_of(stage, replica, shard);
    programs_.emplace_back();
    sums_.clear(), summed_.clear(), agreed_.clear();
    find_segments();
    for (const Instruction& i : lists_[std::size_t(stage)]) run(i);
  }

  bool has_table() const { return case_.tied && (stage_ == 0 || stage_ + 1 == case_.stages); }
  bool over_stages(const std::string& name) const { return name == "table" && case_.stages > 1; }
  int expert_rank() const { return shard_ % case_.experts; }
  static constexpr int blocks = 2, experts_of_rank = 2;

  std::string block(int chunk, int b) const {
    return cat("chunk ", chunk * case_.stages + stage_, " block ", b);
  }
  std::string expert(const std::string& block, int e) const {
    return cat(block, " expert ", expert_rank(), e);
  }

  void find_segments() {
    segments_.clear();
    if (has_table()) segments_.push_back("table");
    for (int c = 0; c < case_.chunks; ++c)
      for (int b = 0; b < blocks; ++b) {
        segments_.push_back(block(c, b));
        for (int e = 0; case_.router && e < experts_of_rank; ++e) segments_.push_back(expert(block(c, b), e));
      }
    for (const std::string& name : segments_) sums_of(name);
  }

  /// All ranks with the same experts find the same ones in use.
  bool in_use(const std::string& name, std::int64_t micro_batch) const {
    std::uint64_t h = case_.router * 0x9E3779B97F4A7C15u + std::uint64_t(micro_batch) * 0xBF58476D1CE4E5B9u;
    for (const char letter : name) h = (h ^ std::uint64_t(letter)) * 0x100000001B3u;
    return (h >> 33) % 3 == 0;
  }

  void run(const Instruction& i) {
    const int number = i.chunk * case_.stages + stage_, all = case_.chunks * case_.stages;
    const auto value = [&](bool gradient, int chunk) {
      return key(value_mark, Key(gradient) << 16 | Key(chunk), Key(replica_ * case_.shards + shard_),
                 Key(i.micro_batch));
    };
    switch (i.op) {
      case Op::forward:
        if (number > 0) wait(value(false, number - 1));
        for (int b = 0; b < blocks; ++b) cross(block(i.chunk, b), i.micro_batch, true);
        return set(value(false, number));
      case Op::backward:
      case Op::backward_input:
        if (number + 1 < all) wait(value(true, number + 1));
        if (number + 1 == all && has_table() && i.op == Op::backward) close("table", i);
        for (int b = blocks; b-- > 0;) {
          cross(block(i.chunk, b), i.micro_batch, false);
          if (i.op == Op::backward) close_block(block(i.chunk, b), i);
        }
        if (i.op == Op::backward) end_pass(i);
        return set(value(true, number));
      case Op::weight_gradients:
        if (number + 1 == all && has_table()) close("table", i);
        for (int b = blocks; b-- > 0;) close_block(block(i.chunk, b), i);
        return end_pass(i);
      case Op::reduce:
        if (i.micro_batch + 1 == case_.micro_batches) finish();
        return;
      default:
        return;
    }
  }

  /// A pass's exchanges with others on its way through a block: parameters, tokens, and, forward, which
  /// experts anybody has tokens for.
  void cross(const std::string& block, std::int64_t micro_batch, bool forward) {
    exchange(group(shard_group, stage_, replica_), cat("parameters of ", block, forward));
    if (!case_.router) return;
    if (forward) exchange(group(replicas_of_experts, stage_, 0, expert_rank()), block);
    exchange(group(expert_group, stage_, replica_, shard_ / case_.experts), block);
    for (int e = 0; e < experts_of_rank; ++e)
      if (in_use(expert(block, e), micro_batch))
        exchange(group(same_experts, stage_, replica_, expert_rank()),
                 cat("parameters of ", expert(block, e)));
    exchange(group(expert_group, stage_, replica_, shard_ / case_.experts), block);
  }

  void close_block(const std::string& block, const Instruction& i) {
    for (int e = experts_of_rank; case_.router && e-- > 0;) {
      const bool skipped = case_.fault == ReplicaCase::Fault::no_tokens_no_turn && replica_ == 1 &&
                           (e + i.micro_batch) % 2 == 0;  // agreed with nobody
      if (in_use(expert(block, e), i.micro_batch) && !skipped) close(expert(block, e), i);
    }
    close(block, i);
  }

  // ---- Gradients ----

  void close(const std::string& name, const Instruction& i) {
    summed_.insert(name);
    const bool lowest = name != "table" || stage_ > 0 || i.chunk == 0;
    const bool apart = over_stages(name) && case_.fault != ReplicaCase::Fault::tied_in_backward;
    const bool agrees = i.micro_batch + 1 == case_.micro_batches && lowest && !apart;
    if (agrees) agreed_.insert(name);
    if (case_.folds || agrees) submit(name, agrees, true);
  }

  void end_pass(const Instruction& i) {
    if (stage_ == 0 && i.chunk == 0 && has_table()) close("table", i);
    for (Sums& sums : sums_) {
      flush(sums);
      bool drains = true;
      for (std::size_t b = sums.settled; b < sums.buckets.size(); ++b) drains &= !sums.buckets[b].last;
      if (drains || sums.chain.length == 1) take(sums, sums.turns.drain());
    }
  }

  void finish() {
    for (const std::string& name : segments_) {
      if (!summed_.count(name) || !agreed_.insert(name).second) continue;
      if (!case_.folds) submit(name, !over_stages(name), true);
      if (case_.folds || over_stages(name)) submit(name, true, false);
    }
    for (Sums& sums : sums_) {
      flush(sums);
      if (sums.chain.length > 1) launch(sums, {true, false, "end", 0});
      take(sums, sums.turns.drain());
    }
    exchange(group(world_group), "norm");
  }

  // ---- reducers ----

  static bool is_expert(const std::string& name) { return name.find("expert") != std::string::npos; }

  Key folds_over(const std::string& name) const {
    return is_expert(name) ? group(same_experts, stage_, replica_, expert_rank())
                           : group(shard_group, stage_, replica_);
  }

  Chain chain_of(const std::string& name) const {
    const bool own = is_expert(name) && case_.fault != ReplicaCase::Fault::experts_among_dense;
    if (over_stages(name))
      return {group(table_group, 0, 0, shard_), (stage_ == 0 ? 0 : case_.replicas) + replica_,
              2 * case_.replicas};
    return {group(own ? replicas_of_experts : shard_group, stage_, 63, shard_), replica_, case_.replicas};
  }

  Sums& sums_of(const std::string& name) {
    const Chain chain = chain_of(name);
    for (Sums& sums : sums_)
      if (sums.chain.id == chain.id) return sums;
    const bool swapped = case_.fault == ReplicaCase::Fault::lags_swapped;
    const int place = swapped ? chain.length - 1 - chain.place : chain.place;
    return sums_.emplace_back(
        Sums{chain, Turns({chain.length, place, chain.length > 1, case_.overlap}), {}, {}, 0, 0});
  }

  static Queue& queue_of(Sums& sums, Key group) {
    for (Queue& queue : sums.queues)
      if (queue.group == group) return queue;
    return sums.queues.emplace_back(Queue{group, {}, 0});
  }

  void submit(const std::string& name, bool last, bool folds) {
    if (chain_of(name).length == 1 && !folds) return;
    Sums& sums = sums_of(name);
    Queue& queue = queue_of(sums, folds_over(name));
    if (!queue.items.empty() && queue.items.back().last != last) send_all(sums, queue);
    const std::int64_t elements = is_expert(name) ? 3 : 5 + name.back() % 3;
    queue.items.push_back({name, elements, last, folds});
    queue.elements += elements;
    while (queue.elements >= case_.bucket) send(sums, queue);
  }

  void send_all(Sums& sums, Queue& queue) {
    while (queue.elements > 0) send(sums, queue);
  }

  void flush(Sums& sums) {
    for (Queue& queue : sums.queues) send_all(sums, queue);
  }

  void send(Sums& sums, Queue& queue) {
    Bucket bucket{queue.items.front().last, false, {}, queue.group};
    std::int64_t room = case_.bucket;
    while (room > 0 && !queue.items.empty()) {
      Item& item = queue.items.front();
      const std::int64_t n = std::min(room, item.left);
      bucket.label += cat(item.name, ' ', item.left, ' ', n, ' ');
      bucket.folds |= item.folds;
      item.left -= n, room -= n, queue.elements -= n;
      if (item.left == 0) queue.items.pop_front();
    }
    launch(sums, std::move(bucket));
  }

  static Key with(Mark mark, const Chain& chain, int place, std::size_t n) {
    return key(mark, chain.id, Key(place), n);
  }

  void launch(Sums& sums, Bucket bucket) {
    const Chain& chain = sums.chain;
    if (bucket.last && chain.length > 1) {
      bucket.transfer = sums.transfers++;
      transfers_[chain.id][chain.place].push_back(bucket.label);
      set(with(launched_mark, chain, chain.place, bucket.transfer));
    }
    sums.buckets.push_back(std::move(bucket));
    most_under_way_ = std::max(most_under_way_, sums.buckets.size() - sums.settled);
    take(sums, sums.turns.launch());
  }

  void take(Sums& sums, const std::vector<Turn>& turns) {
    for (const Turn& turn : turns) take(sums, turn, sums.buckets[turn.bucket]);
  }

  void take(Sums& sums, const Turn& turn, Bucket& bucket) {
    const Chain& chain = sums.chain;
    const bool passes = bucket.last && chain.length > 1;
    const bool first = chain.place == 0, end = chain.place + 1 == chain.length;
    const auto before = chain.place - 1, behind = chain.place + 1;
    switch (turn.op) {
      case Turn::Op::issue:
        if (passes && !first) wait(with(sent_mark, chain, before, bucket.transfer));
        if (bucket.folds) bucket.call = call(bucket.group, bucket.label);
        return;
      case Turn::Op::pass_on:
        if (bucket.folds) wait_for_call(bucket.group, bucket.call);
        if (passes) set(with(sent_mark, chain, chain.place, bucket.transfer));
        return;
      case Turn::Op::pass_back:
        if (passes && !end) wait(with(returned_mark, chain, behind, bucket.transfer));
        if (passes) set(with(returned_mark, chain, chain.place, bucket.transfer));
        return;
      case Turn::Op::settle:
        if (passes && !end) wait(with(launched_mark, chain, behind, bucket.transfer));
        if (passes && !first) wait(with(sent_mark, chain, before, bucket.transfer));
        if (bucket.last && bucket.group && case_.gathers) exchange(bucket.group, "sums of " + bucket.label);
        ++sums.settled;
    }
  }

  // ---- all of them ----

  std::string play() {
    std::vector<std::size_t> at(programs_.size(), 0);
    std::unordered_set<Key> happened;
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < programs_.size(); ++rank)
        for (std::size_t& i = at[rank]; i < programs_[rank].size(); ++i, moved = true) {
          const Action& action = programs_[rank][i];
          if (action.waits && !happened.count(action.key)) break;
          if (!action.waits) happened.insert(action.key);
        }
    }
    for (std::size_t rank = 0; rank < programs_.size(); ++rank)
      if (at[rank] < programs_[rank].size())
        return cat("rank ", rank, " waits for ever, at ", at[rank], " of ", programs_[rank].size());
    return "";
  }

  ReplicaCase case_;
  Lists lists_;
  std::vector<std::vector<Action>> programs_;
  /// By group, or chain, and rank, or place in the chain: what is called, in order.
  std::map<Key, std::map<int, std::vector<std::string>>> calls_, transfers_;
  int stage_ = 0, replica_ = 0, shard_ = 0, rank_ = 0;
  std::vector<std::string> segments_;
  std::set<std::string> summed_, agreed_;
  std::deque<Sums> sums_;
  std::size_t most_under_way_ = 0;
};

}  // namespace sherd::sharding
