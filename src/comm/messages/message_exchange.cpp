#include "comm/messages/message_exchange.h"

#include <algorithm>
#include <cstring>

namespace sherd::comm {
void MessageExchange::fail_and_throw(const std::string& reason) {
  health_->fail(reason);
  throw Error(ErrorKind::comm, health_->failure());
}

void MessageExchange::send_to(int peer, const std::byte* data, std::size_t bytes, int tag) {
  for (std::size_t done = 0; done < bytes; done += longest_message)
    open_.push_back(
        {port_->send(data + done, std::min(longest_message, bytes - done), peer, tag), peer, false});
}

void MessageExchange::receive_from(int peer, std::byte* data, std::size_t bytes, int tag) {
  for (std::size_t done = 0; done < bytes; done += longest_message)
    open_.push_back(
        {port_->receive(data + done, std::min(longest_message, bytes - done), peer, tag), peer, true});
}

void MessageExchange::look_after_peers() noexcept {
  if (health_->failed()) return;
  try {
    if (const std::string wrong = announcer_.check(); !wrong.empty())
      return health_->fail(cat(name_, ": ", wrong));
  } catch (const std::exception& error) {
    return health_->fail(cat(name_, ": rank ", rank(), " failed: ", error.what()));
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank() && health_->dead(r))
      return health_->fail(
          cat(name_, ": rank ", r,
              " is dead: its process or the connection to it ended; see that rank's own output"));
}

/// A lost peer's last messages may still be on their way when the news of its end is here: `grace` runs
/// first.
void MessageExchange::check_peers(const std::vector<int>& peers, const Call& call, const Deadline& deadline,
                                  std::optional<Deadline>& grace) {
  if (health_->failed()) throw Error(ErrorKind::comm, health_->failure());
  std::string why;
  for (const int peer : peers) {
    if (!health_->lost(peer, why)) continue;
    if (!grace) grace = Deadline::after_seconds(0.5);
    if (!grace->passed()) return;
    fail_and_throw(cat(name_, ": rank ", peer, " ", why, " while rank ", rank(), " waited for it in ",
                       describe(call), "; see that rank's own output"));
  }
  if (deadline.passed())
    fail_and_throw(cat(name_, ": ", describe(call), ": ", name_ranks(peers), " did not come within ",
                       options_.timeout_seconds, " s, while rank ", rank(),
                       " waited; raise parallel.timeout_seconds if the work in between takes that long"));
}

void MessageExchange::finish(const Call& call) {
  const Deadline deadline = Deadline::after_seconds(options_.timeout_seconds);
  std::optional<Deadline> grace;
  try {
    for (Backoff backoff(*port_);; backoff.pause()) {
      const std::size_t before = open_.size();
      std::erase_if(open_, [&](const Open& message) { return port_->test(message.request); });
      if (open_.empty()) return;
      if (open_.size() != before) backoff.reset();
      if (!backoff.every(64) && !deadline.passed()) continue;
      std::vector<int> peers;
      for (const Open& message : open_) {
        if (message.peer != everybody) peers.push_back(message.peer);
        for (int r = 0; message.peer == everybody && r < size(); ++r)
          if (r != rank()) peers.push_back(r);
      }
      std::sort(peers.begin(), peers.end());
      peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
      check_peers(peers, call, deadline, grace);
    }
  } catch (...) {
    for (const Open& message : open_)
      message.receiving ? port_->cancel(message.request) : port_->release(message.request);
    open_.clear();
    throw;
  }
}

std::vector<std::byte> MessageExchange::exchange(const Call& call, const void* mine, std::size_t bytes,
                                                 int tag) {
  std::vector<std::byte> all(bytes * static_cast<std::size_t>(size()));
  std::memcpy(all.data() + static_cast<std::size_t>(rank()) * bytes, mine, bytes);
  for (int r = 0; r < size(); ++r)
    if (r != rank()) receive_from(r, all.data() + static_cast<std::size_t>(r) * bytes, bytes, tag);
  for (int r = 0; r < size(); ++r)
    if (r != rank()) send_to(r, all.data() + static_cast<std::size_t>(rank()) * bytes, bytes, tag);
  finish(call);
  return all;
}

std::vector<std::int64_t> MessageExchange::exchange_words(const Call& call,
                                                          const std::vector<std::int64_t>& mine) {
  const std::vector<std::byte> bytes =
      exchange(call, mine.data(), mine.size() * sizeof(std::int64_t), data_tag);
  std::vector<std::int64_t> all(bytes.size() / sizeof(std::int64_t));
  if (!all.empty()) std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}

void MessageExchange::open_round(const Call& call) {
  const Signature mine = sign(call);
  const std::vector<std::byte> bytes = exchange(call, &mine, sizeof mine, signature_tag);
  std::vector<Signature> all(static_cast<std::size_t>(size()));
  std::memcpy(all.data(), bytes.data(), bytes.size());
  if (const std::string wrong = mismatch(all); !wrong.empty()) fail_and_throw(cat(name_, ": ", wrong));
  check_announced();  // all that the previous rank announced before is here
}

void MessageExchange::run(Call& call) {
  worker_->begin(call, bytes_moved(call));
  open_round(call);
  if (!sums_natively(*port_, call)) return dispatch(call);
  sum_natively(*port_, *worker_, call, [&](int request) {
    open_.push_back({request, everybody, false});
    finish(call);
  });
}

std::unique_ptr<Backend> MessageExchange::split(int color, int key) {
  Call call;
  call.kind = Collective::agree, call.words = {color, key}, call.label = "split";
  run(call);
  auto part =
      port_->split(color, key, {timeout_seconds(), cat("splitting ", name_), [this] { return failure(); }});
  if (!part) return nullptr;
  std::string part_name = group_name(part->kind(), part->world_ranks(), part->world_size());
  return make_message_exchange(std::move(part), std::move(part_name), options_, health_);
}

std::unique_ptr<Backend> make_message_exchange(std::shared_ptr<Port> port, std::string name,
                                               const CommOptions& options, std::shared_ptr<Health> parent) {
  return std::make_unique<MessageExchange>(std::move(port), std::move(name), options, std::move(parent));
}

}  // namespace sherd::comm
