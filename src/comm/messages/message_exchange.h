#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/exchange/collective_backend.h"
#include "comm/exchange/worker.h"
#include "comm/messages/announcer.h"
#include "comm/messages/message_health.h"
#include "comm/messages/native_sums.h"
#include "comm/messages/port.h"

namespace sherd::comm {

/// Waits between looks at messages.
class Backoff {
 public:
  explicit Backoff(Port& port) : port_(port), seen_(port.news()) {}
  void pause() { seen_ = port_.pause(seen_, turns_++); }
  bool every(int n) const { return turns_ % n == n - 1; }
  void reset() { turns_ = 0; }

 private:
  Port& port_;
  std::uint64_t seen_;
  int turns_ = 0;
};

/// Collectives and transfers over messages, for groups that span machines. Non-blocking messages only, polled
/// until the deadline; sums run in rank order here, so results are those of SharedExchange to the bit.
///
/// No message lies at a peer that does not want it for longer than its rank takes to come to the call: the
/// payload of a collective leaves when all ranks have said that they are in it, that of a transfer when the
/// receiver has asked for it.
class MessageExchange final : public CollectiveBackend {
 public:
  static constexpr std::size_t longest_message = std::size_t{1} << 28;

  MessageExchange(std::shared_ptr<Port> port, std::string name, const CommOptions& options,
                  std::shared_ptr<Health> parent)
      : port_(std::move(port)),
        name_(std::move(name)),
        options_(options),
        worker_(make_cpu_worker(options.threads)),
        health_(std::make_shared<MessageHealth>(port_, name_, std::move(parent))),
        announcer_(port_),
        sends_(static_cast<std::size_t>(size())),
        receives_(sends_.size()) {
    port_->on_leave([weak = std::weak_ptr<MessageHealth>(health_)] {
      if (const auto alive = weak.lock()) alive->depart();
    });
  }
  ~MessageExchange() override { health_->depart(); }

  int rank() const override { return port_->rank(); }
  int size() const override { return port_->size(); }
  const std::string& name() const override { return name_; }
  double timeout_seconds() const override { return options_.timeout_seconds; }
  int threads() const override { return options_.threads; }
  void fail(const std::string& reason) noexcept override { health_->fail(reason); }
  std::string failure() const override { return health_->failure(); }
  void nudge() noexcept override {}  // await() polls
  void look_after_peers() noexcept override;
  std::uint64_t announce(const Signature& call) override {
    const std::uint64_t number = announcer_.add(call);
    check_announced();
    return number;
  }
  std::vector<int> not_announced(std::uint64_t number) override { return announcer_.absent(number); }

  void run(Call& call) override;
  void start(Call& transfer) override;
  bool advance(Call& transfer) override;
  void await(const std::function<bool()>& ready, const std::vector<Call*>& active) override;

  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    return device.allocate(bytes, category, tier);
  }

  std::unique_ptr<Backend> split(int color, int key) override;

 private:
  // 3 is the Announcer's; those from 16 on are of transfers.
  static constexpr int signature_tag = 1, data_tag = 2;
  static constexpr int everybody = -1;  ///< in the place of a peer: a request that all ranks complete

  void open_round(const Call& call);
  void check_announced() {
    if (const std::string wrong = announcer_.check(); !wrong.empty()) fail_and_throw(cat(name_, ": ", wrong));
  }
  void barrier(Call&) override {}  // what opens a round is one
  void all_gather(Call& call) override;
  void reduce_scatter(Call& call) override;
  void all_reduce(Call& call) override;
  void broadcast(Call& call) override;
  void all_to_all(Call& call) override;
  void agree(Call& call) override { call.words = exchange_words(call, call.words); }

  // Parts of a transfer.
  void send_payload(Call& transfer);
  void take_payload(Call& transfer);

  /// Every rank's `bytes` at `mine`, in rank order.
  std::vector<std::byte> exchange(const Call& call, const void* mine, std::size_t bytes, int tag);
  std::vector<std::int64_t> exchange_words(const Call& call, const std::vector<std::int64_t>& mine);
  void send_to(int peer, const std::byte* data, std::size_t bytes, int tag = data_tag);
  void receive_from(int peer, std::byte* data, std::size_t bytes, int tag = data_tag);
  /// Waits for all of open_.
  void finish(const Call& call);
  /// Sums what each rank holds of part `rank` of its tensor, in pieces; full_at(r, begin) is where this
  /// rank's own elements for rank r begin, and count(r) how many there are.
  template <class At, class Count, class Sum>
  void reduce_parts(const Call& call, DType dtype, const At& full_at, const Count& count, const Sum& sum);
  [[noreturn]] void fail_and_throw(const std::string& reason);
  void check_peers(const std::vector<int>& peers, const Call& call, const Deadline& deadline,
                   std::optional<Deadline>& grace);

  std::shared_ptr<Port> port_;
  std::string name_;
  CommOptions options_;
  std::unique_ptr<Worker> worker_;
  std::shared_ptr<MessageHealth> health_;
  Announcer announcer_;
  /// Messages under way.
  struct Open {
    int request;
    int peer;
    bool receiving;
  };
  std::vector<Open> open_;
  std::vector<std::byte> scratch_;
  std::vector<std::uint64_t> sends_, receives_;  ///< transfers started, by peer
};

std::unique_ptr<Backend> make_message_exchange(std::shared_ptr<Port> port, std::string name,
                                               const CommOptions& options, std::shared_ptr<Health> parent);

}  // namespace sherd::comm
