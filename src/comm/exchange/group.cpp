#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/threads.h"
#include "base/waits.h"
#include "comm/exchange/backend.h"
#include "comm/exchange/gpu/gpu_order.h"
#include "comm/exchange/gpu/gpu_route.h"
#include "comm/exchange/siblings.h"
#include "comm/exchange/task.h"
#include "device/trace_range.h"

namespace sherd::comm {
namespace {

class BackendGroup final : public Communicator {
  /// Runs `work`; whatever it throws breaks the group, for a peer cannot know how far this rank came.
  template <class Body>
  auto guarded(const Body& work) {
    try {
      return work();
    } catch (const std::exception& error) {
      break_group(error);
      throw;
    }
  }
  /// Runs what ranks do together beside calls.
  template <class Body>
  auto meet(const char* label, const Body& body) {
    Call call = make(Collective::agree, {.label = label});
    issue(call);
    return guarded([&] {
      const RecordedRun run(call);
      return body();
    });
  }
  void break_group(const std::exception& error) {
    if (backend_->failure().empty()) backend_->fail(cat(backend_->own_name(), " failed: ", error.what()));
    record_failure();
  }
  void record_failure() noexcept {
    if (recorded_) siblings_->recorder()->tell_failure(backend_->failure());
  }

 public:
  explicit BackendGroup(std::unique_ptr<Backend> backend,
                        std::shared_ptr<Siblings> siblings = std::make_shared<Siblings>(),
                        std::string id = "world")
      : backend_(std::move(backend)),
        siblings_(std::move(siblings)),
        id_(std::move(id)),
        exceptions_(std::uncaught_exceptions()) {
    siblings_->add(*backend_);
    if (size() == 1 || backend_->immediate()) return;  // nobody is waited for
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) ranks.push_back(backend_->world_rank(r));
    recorded_ = siblings_->recorder()->add(id_, name(), std::move(ranks), backend_->world_rank(rank()));
  }

  ~BackendGroup() override {
    // Leaving because of an exception, or with transfers whose other ends may never come: peers shall not
    // wait for what this rank had queued, nor this rank for them.
    const std::size_t open = open_transfers();
    if (std::uncaught_exceptions() > exceptions_ && backend_->failure().empty())
      backend_->fail(leaving_because(siblings_->cause()));
    else if (open > 0 && backend_->failure().empty())
      backend_->fail(
          cat(backend_->own_name(), " left the group with ", counted(open, "transfer"), " under way"));
    if (std::uncaught_exceptions() > exceptions_) record_failure();
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    backend_->wake();
    if (thread_.joinable()) thread_.join();
    siblings_->remove(*backend_);
  }

  int rank() const override { return backend_->rank(); }
  int size() const override { return backend_->size(); }
  std::string name() const override { return backend_->name(); }

  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    backend_->throw_if_failed();
    drain();
    return meet("memory", [&] { return backend_->allocate(device, bytes, category, tier); });
  }

  void bind(const std::shared_ptr<device::Device>& device) override {
    backend_->throw_if_failed();
    drain();
    if (backend_->immediate()) return;
    auto gpu = std::dynamic_pointer_cast<device::Accelerator>(device);
    route_.reset(), order_.reset();
    route_ = meet("GPUs", [&] { return make_gpu_route(*backend_, gpu); });
    if (gpu) order_ = std::make_shared<GpuOrder>(std::move(gpu));
  }

  Work all_gather(std::vector<GatherPiece> pieces, const CallOptions& options) override {
    Call call = make(Collective::all_gather, options);
    call.gathers = std::move(pieces);
    return submit(std::move(call), options, &Traffic::all_gather);
  }

  Work reduce_scatter(std::vector<ReducePiece> pieces, DType rounding, const CallOptions& options) override {
    Call call = make(Collective::reduce_scatter, options);
    call.reduces = std::move(pieces), call.rounding = rounding, call.reduction = options.reduction;
    return submit(std::move(call), options, &Traffic::reduce_scatter);
  }

  Work all_reduce(const Tensor& x, ReduceOp op, double factor, const CallOptions& options) override {
    Call call = make(Collective::all_reduce, options);
    call.x = x, call.op = op, call.factor = factor, call.reduction = options.reduction;
    return submit(std::move(call), options, &Traffic::all_reduce);
  }

  Work broadcast(const Tensor& x, int root, const CallOptions& options) override {
    Call call = make(Collective::broadcast, options);
    call.x = x, call.peer = root;
    return submit(std::move(call), options, &Traffic::broadcast);
  }

  Work all_to_all(const Tensor& in, const Tensor& out, std::span<const std::int64_t> in_counts,
                  std::span<const std::int64_t> out_counts, const CallOptions& options) override {
    Call call = make(Collective::all_to_all, options);
    call.x = in, call.out = out;
    call.in_counts.assign(in_counts.begin(), in_counts.end());
    call.out_counts.assign(out_counts.begin(), out_counts.end());
    return submit(std::move(call), options, &Traffic::all_to_all);
  }

  Work send(const Tensor& x, int to, const CallOptions& options) override {
    Call call = make(Collective::send, options);
    call.x = x, call.peer = to;
    return submit(std::move(call), options, &Traffic::p2p);
  }

  Work receive(const Tensor& x, int from, const CallOptions& options) override {
    Call call = make(Collective::receive, options);
    call.x = x, call.peer = from;
    return submit(std::move(call), options, &Traffic::p2p);
  }

  void barrier(const CallOptions& options) override {
    CallOptions now = options;
    now.async = false;
    submit(make(Collective::barrier, now), now, &Traffic::scalars);
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    return split_by([&] { return backend_->split(color, key); }, color, key);
  }

  std::unique_ptr<Communicator> part(const std::vector<std::vector<int>>& parts) override {
    const GroupPart mine = find_part(parts, rank(), size());
    backend_->throw_if_failed();
    if (mine.alone) {
      std::string id = next_id();
      auto group = mine.color < 0
                       ? nullptr
                       : std::make_unique<BackendGroup>(backend_->part(mine), siblings_, std::move(id));
      if (group && order_) group->bind(order_->gpu());
      return group;
    }
    std::string label = "parts";  // compared between ranks
    for (const auto& each : parts) label += cat(" {", joined_text(each), "}");
    barrier({.label = std::move(label)});
    return split_by([&] { return backend_->part(mine); }, mine.color, mine.key());
  }

  void abort(const std::string& reason) noexcept override {
    backend_->fail(cat(backend_->own_name(), " failed: ", reason));
    record_failure();
  }

  const std::shared_ptr<FlightRecorder>& flight_recorder() const override { return siblings_->recorder(); }
  void set_purpose(const std::string& purpose) override {
    if (recorded_) siblings_->recorder()->set_purpose(*recorded_, purpose);
  }

  Traffic traffic() const override {
    Traffic out = traffic_;
    out.between_machines = backend_->bytes_between_machines() - forgotten_;
    return out;
  }
  void reset_traffic() override { traffic_ = {}, forgotten_ = backend_->bytes_between_machines(); }

 private:
  std::string leaving_because(const std::string& cause) const {
    const std::string left = cat(backend_->own_name(), " left the group because of an error");
    return cause.empty() ? cat(left, "; see its own output") : cat(left, " in another: ", cause);
  }

  template <class Split>
  std::unique_ptr<Communicator> split_by(const Split& split_backend, int color, int key) {
    backend_->throw_if_failed();
    drain();
    std::string id = next_id();
    return meet("split", [&]() -> std::unique_ptr<Communicator> {
      std::unique_ptr<Backend> part = split_backend();
      std::unique_ptr<GpuRoute> route = route_ ? route_->split(color, key, part.get()) : nullptr;
      if (!part) return nullptr;
      auto group = std::make_unique<BackendGroup>(std::move(part), siblings_, std::move(id));
      group->route_ = std::move(route), group->order_ = order_;
      return group;
    });
  }

  /// The name of the group that is split off next, by which all its ranks know it.
  std::string next_id() { return cat(id_, '.', ++splits_); }

  void issue(Call& call) noexcept {
    if (recorded_)
      call.record = siblings_->recorder()->issue(
          *recorded_, {call.kind, call.peer, call.world_peer, bytes_moved(call), call.label});
  }

  static Call make(Collective kind, const CallOptions& options) {
    Call call;
    call.kind = kind, call.label = options.label, call.async = options.async;
    return call;
  }

  Work submit(Call call, const CallOptions& options, std::uint64_t Traffic::*book) {
    check_call(call, rank(), size());
    if (call.peer >= 0) call.world_peer = backend_->world_rank(call.peer);
    backend_->throw_if_failed();
    traffic_.*(options.scalar ? &Traffic::scalars : book) += bytes_sent(call, rank(), size());
    issue(call);
    if (order_) order_->admit(call);
    if (call.gpu && route_->immediate() && !is_transfer(call)) {
      if (!route_->queues(call)) drain();  // the group's thread would meet the others beside it
      return queue_on_gpu(std::move(call), options);
    }
    if (options.async && !backend_->immediate()) return enqueue(std::move(call));
    if (is_transfer(call) && busy()) {
      // Beside the queued transfers rather than after them, so that a rank may send asynchronously, then
      // receive.
      Work work = enqueue(std::move(call));
      work.wait();
      return work;
    }
    drain();
    const auto now = make_task(std::move(call));  // whose destructor outlasts streams
    guarded([&] {
      if (is_transfer(now->call))
        run_transfer(now->call);
      else
        run(now->call);
    });
    if (order_) order_->settle(now->call);
    return {};
  }

  /// Where running a call takes no time: on the caller's thread, asynchronous or not.
  Work queue_on_gpu(Call call, const CallOptions& options) {
    auto task = make_task(std::move(call));
    guarded([&] { run(task->call); });
    task->finish(nullptr);
    if (!options.async) task->wait();
    return Work(std::move(task));
  }

  void run(Call& call) {
    const device::TraceRange range(name_of(call.kind), call.label);
    const RecordedRun recorded(call);
    if (order_) order_->before(call);
    if (call.gpu)
      route_->run(call);
    else
      backend_->run(call);
  }

  std::shared_ptr<Task> make_task(Call call) {
    int peer = -1;
    if (is_transfer(call)) peer = call.world_peer, call.deadline = std::make_shared<TransferDeadline>();
    return std::make_shared<Task>(std::move(call), backend_->timeout_seconds(), order_, siblings_, peer);
  }

  void run_transfer(Call& call) {
    const Siblings::Wait told(*siblings_, call.world_peer);
    call.deadline->begin(backend_->timeout_seconds());
    try {
      const RecordedRun recorded(call);
      start(call);
      for (bool over = false; !over;) await_some([&] { return over = advance(call); }, {&call});
    } catch (const std::exception& error) {
      break_group(error);
      cancel(call);
      throw;
    }
  }
  void start(Call& transfer) {
    if (order_) order_->before(transfer);
    if (transfer.gpu)
      route_->start(transfer);
    else
      backend_->start(transfer);
  }
  bool advance(Call& transfer) {
    return by_route(transfer) ? route_->advance(transfer) : backend_->advance(transfer);
  }
  void cancel(Call& transfer) noexcept {
    by_route(transfer) ? route_->cancel(transfer) : backend_->cancel(transfer);
  }
  static bool by_route(const Call& transfer) { return transfer.travelling || transfer.greeting; }

  /// Returns when ready() was true, or soon where a transfer must be looked at.
  void await_some(const std::function<bool()>& ready, const std::vector<Call*>& active) {
    const auto polled = [&] {
      return std::any_of(active.begin(), active.end(), [](const Call* call) { return call->polled; });
    };
    bool done = false;
    backend_->await([&] { return (done = ready()) || polled(); }, active);
    if (!done) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  Work enqueue(Call call) {
    auto task = make_task(std::move(call));
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(task);
      queued_.store(true);
      if (is_transfer(task->call)) open_.push_back(task->call.deadline);
      if (!thread_.joinable())
        thread_ = std::thread(own_thread([this, rank = ThreadRank::current()] { serve(rank); }));
    }
    wake_.notify_all();
    backend_->wake();
    return Work(std::move(task));
  }

  bool busy() {
    std::lock_guard lock(mutex_);
    return busy_ || !queue_.empty();
  }

  std::size_t open_transfers() {
    std::lock_guard lock(mutex_);
    return open_.size();
  }

  /// Waits until the group's thread has nothing left to do. Each call that it runs ends at its own deadline.
  void drain() {
    if (!thread_.joinable()) return;
    {
      std::unique_lock lock(mutex_);
      for (const auto& transfer : open_) transfer->begin(backend_->timeout_seconds());
      const WaitScope waits(WaitFor::ranks);
      idle_.wait(lock, [&] { return queue_.empty() && !busy_; });
    }
    backend_->throw_if_failed();
  }

  // ---- the group's own thread ----

  void serve(int rank) {
    ThreadRank scope(rank);
    set_flush_denormals();
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      busy_ = true;
      const bool transfer = is_transfer(queue_.front()->call);
      std::shared_ptr<Task> task = queue_.front();
      if (!transfer) queue_.pop_front();
      lock.unlock();
      if (transfer)
        serve_transfers();
      else
        run(*task);
      task.reset();
      lock.lock();
      busy_ = false;
      if (queue_.empty()) idle_.notify_all();
    }
  }

  void run(Task& task) {
    try {
      backend_->throw_if_failed();
      guarded([&] { run(task.call); });
      task.finish(nullptr);
    } catch (...) {
      task.finish(std::current_exception());
    }
  }

  /// Sends and receives that follow each other in the queue are under way together, so that two ranks may
  /// each send before they receive. Returns when none is left and the head of the queue is something else.
  void serve_transfers() {
    std::vector<std::shared_ptr<Task>> active;
    try {
      for (;;) {
        take_transfers(active);
        if (active.empty()) return;
        std::vector<Call*> calls;
        for (const auto& task : active) calls.push_back(&task->call);
        std::vector<bool> over(active.size());
        await_some([&] { return advance_all(calls, over) || queued_.load(); }, calls);
        for (std::size_t i = active.size(); i-- > 0;)
          if (over[i]) {
            finish_transfer(*active[i], nullptr);
            active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
          }
      }
    } catch (const std::exception& error) {
      for (const auto& task : active) task->call.record.end(false);
      break_group(error);
      for (const auto& task : active) {
        cancel(task->call);
        finish_transfer(*task, std::current_exception());
      }
    }
  }

  /// Who waited for it finds it no more under way.
  void finish_transfer(Task& task, std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      std::erase(open_, task.call.deadline);
    }
    if (error || !task.call.watched) task.call.record.end(!error);
    task.finish(std::move(error));
  }

  void take_transfers(std::vector<std::shared_ptr<Task>>& active) {
    std::size_t before = active.size();
    {
      std::lock_guard lock(mutex_);
      for (; !queue_.empty() && is_transfer(queue_.front()->call); queue_.pop_front())
        active.push_back(queue_.front());
      queued_.store(false);
    }
    // A start may wait for a GPU; who queues the next one shall not.
    for (; before < active.size(); ++before) {
      active[before]->call.record.begin();
      start(active[before]->call);
    }
  }

  bool advance_all(const std::vector<Call*>& calls, std::vector<bool>& over) {
    bool any = false;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      over[i] = over[i] || advance(*calls[i]);
      any = any || over[i];
    }
    return any;
  }

  std::unique_ptr<Backend> backend_;
  std::shared_ptr<Siblings> siblings_;
  std::unique_ptr<GpuRoute> route_;                  ///< for tensors in GPU memory; null without a GPU
  std::shared_ptr<GpuOrder> order_;                  ///< null without a GPU
  std::string id_;                                   ///< as next_id() gave it
  int splits_ = 0;                                   ///< that all ranks have made of it
  std::shared_ptr<FlightRecorder::Group> recorded_;  ///< null where nobody is waited for
  int exceptions_;                                   ///< in flight when the group was made
  Traffic traffic_;                                  ///< counted on the caller's thread
  std::uint64_t forgotten_ = 0;  ///< bytes between machines that reset_traffic() passed over
  std::thread thread_;           ///< started by the first asynchronous call
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<std::shared_ptr<Task>> queue_;  // guarded by mutex_
  std::atomic<bool> queued_{false};          // something was added since take_transfers()
  /// The transfers that are queued and not finished. Guarded by mutex_.
  std::vector<std::shared_ptr<TransferDeadline>> open_;
  bool busy_ = false;      // guarded by mutex_
  bool stopping_ = false;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Communicator> make_group(std::unique_ptr<Backend> backend) {
  return std::make_unique<BackendGroup>(std::move(backend));
}

}  // namespace sherd::comm
