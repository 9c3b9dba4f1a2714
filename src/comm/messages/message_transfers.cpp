// Point to point over messages, on tags of their own: the sender's signature goes ahead, and the payload
// follows when the receiver has asked for it. So a receive that never comes costs its peer the signature's
// few bytes, however large the tensor.
#include <algorithm>

#include "comm/messages/message_exchange.h"

namespace sherd::comm {
namespace {

enum Phase : int { greeting, moving };

// MPI promises tags up to 32767.
constexpr int first_tag = 16, tags_apart = 8192, tags_of_one = 3;
static_assert(first_tag + tags_apart * tags_of_one <= 32767);
constexpr std::byte go{1};

int signature_tag_of(const Call& transfer) {
  return first_tag + tags_of_one * static_cast<int>(transfer.index % tags_apart);
}
int payload_tag_of(const Call& transfer) {
  return signature_tag_of(transfer) + 1;
}
/// From the receiver to the sender.
int go_tag_of(const Call& transfer) {
  return signature_tag_of(transfer) + 2;
}

/// Calls visit(begin, bytes) for the messages that a payload travels in.
template <class Visit>
void for_each_message(const Tensor& x, const Visit& visit) {
  for (std::size_t done = 0; done < x.bytes(); done += MessageExchange::longest_message)
    visit(x.raw() + done, std::min(MessageExchange::longest_message, x.bytes() - done));
}

}  // namespace

void MessageExchange::start(Call& transfer) {
  const bool sending = transfer.kind == Collective::send;
  transfer.index = (sending ? sends_ : receives_)[static_cast<std::size_t>(transfer.peer)]++;
  transfer.deadline = Deadline::after_seconds(options_.timeout_seconds);
  transfer.phase = greeting;
  transfer.envelope = std::make_shared<Signature>(sign(transfer));
  Signature* envelope = transfer.envelope.get();
  if (!sending) {
    transfer.receives.push_back(
        port_->receive(envelope, sizeof *envelope, transfer.peer, signature_tag_of(transfer)));
    return;
  }
  transfer.sends.push_back(
      port_->send(envelope, sizeof *envelope, transfer.peer, signature_tag_of(transfer)));
  if (transfer.x.bytes() > 0)
    transfer.receives.push_back(
        port_->receive(&transfer.go, sizeof transfer.go, transfer.peer, go_tag_of(transfer)));
}

bool MessageExchange::advance(Call& transfer) {
  const auto over = [&](int request) { return port_->test(request); };
  std::erase_if(transfer.sends, over);
  std::erase_if(transfer.receives, over);
  if (!transfer.sends.empty() || !transfer.receives.empty()) return false;
  if (transfer.phase == moving) return true;
  transfer.phase = moving;
  transfer.kind == Collective::send ? send_payload(transfer) : take_payload(transfer);
  return transfer.sends.empty() && transfer.receives.empty();
}

void MessageExchange::send_payload(Call& transfer) {
  for_each_message(transfer.x, [&](const std::byte* begin, std::size_t bytes) {
    transfer.sends.push_back(port_->send(begin, bytes, transfer.peer, payload_tag_of(transfer)));
  });
}

void MessageExchange::take_payload(Call& transfer) {
  const Signature mine = sign(transfer), theirs = *transfer.envelope;
  if (theirs.elements != mine.elements || theirs.dtype != mine.dtype)
    fail_and_throw(cat(name_, ": mismatched transfer: rank ", transfer.peer, " called ", describe(theirs),
                       "; rank ", rank(), " called ", describe(mine)));
  for_each_message(transfer.x, [&](std::byte* begin, std::size_t bytes) {
    transfer.receives.push_back(port_->receive(begin, bytes, transfer.peer, payload_tag_of(transfer)));
  });
  if (transfer.x.bytes() > 0)
    transfer.sends.push_back(port_->send(&go, sizeof go, transfer.peer, go_tag_of(transfer)));
}

void MessageExchange::await(const std::function<bool()>& ready, const std::vector<Call*>& active) {
  std::optional<Deadline> grace;
  try {
    for (Backoff backoff(*port_);; backoff.pause()) {
      if (ready()) return;
      if (!backoff.every(64) && !active.front()->deadline->passed()) continue;
      std::vector<int> peers;
      for (const Call* transfer : active) peers.push_back(transfer->peer);
      std::sort(peers.begin(), peers.end());
      peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
      check_peers(peers, *active.front(), *active.front()->deadline, grace);
    }
  } catch (...) {
    for (const Call* transfer : active) {
      for (const int request : transfer->receives) port_->cancel(request);
      for (const int request : transfer->sends) port_->release(request);
    }
    throw;
  }
}

}  // namespace sherd::comm
